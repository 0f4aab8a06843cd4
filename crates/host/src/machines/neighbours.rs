//! Checks that an address belongs to a machine: a guest can name any address. Asks the host's neighbour table (arp(7))
//! who owns it on the machine's bridge.
//!
//! Invariant: before the owner is known, nothing is sent to an address but ARP requests and an empty datagram.

use std::io;
use std::net::Ipv4Addr;
use std::time::Duration;
use tokio::net::UdpSocket;
use tokio::time::{Instant, sleep};

/// Path of the neighbour table.
const TABLE: &str = "/proc/net/arp";
/// Flag of an entry whose owner is known (linux/if_arp.h, `ATF_COM`).
const COMPLETE: u32 = 0x02;
/// Port of the discard service, where nobody listens (RFC 863).
const DISCARD: u16 = 9;
/// Longest wait for an answer to the ARP requests. The kernel sends three, a second apart (arp(7), `retrans_time_ms` and
/// `mcast_solicit`), and the first is lost when the bridge does not forward to the machine's port yet.
const PATIENCE: Duration = Duration::from_millis(3500);
const LOOK: Duration = Duration::from_millis(20);

/// Returns an error with the reason unless the address belongs to the machine with this MAC on this bridge.
pub async fn check_owner(address: Ipv4Addr, bridge: &str, mac: &str) -> Result<(), String> {
    if !is_unicast(address) {
        return Err(format!("its guest reports {address}, which is not the address of one machine"));
    }
    // This refreshes an old entry too.
    let asked = ask(address, bridge).await;
    let until = Instant::now() + if asked.is_ok() { PATIENCE } else { Duration::ZERO };
    loop {
        let table = std::fs::read_to_string(TABLE).map_err(|e| format!("{TABLE}: {e}"))?;
        match owner(&table, address, bridge) {
            Some(owner) if owner.eq_ignore_ascii_case(mac) => return Ok(()),
            Some(owner) if Instant::now() >= until => {
                return Err(format!(
                    "its guest names {address}, which is not its own: on {bridge} it is that of {owner}"
                ));
            }
            None if Instant::now() >= until => {
                let why = asked.err().map(|e| format!(" ({e})")).unwrap_or_default();
                return Err(format!(
                    "its guest names {address}, and nobody on {bridge} says that it is theirs{why}: does the host have \
                     an address there?"
                ));
            }
            _ => sleep(LOOK).await,
        }
    }
}

/// Whether the address is a unicast address that others can reach.
pub fn is_unicast(address: Ipv4Addr) -> bool {
    let is_this_network = address.octets()[0] == 0;
    let is_reserved = address.octets()[0] >= 240;
    !(address.is_loopback()
        || address.is_link_local()
        || address.is_multicast()
        || is_this_network
        || is_reserved)
}

/// Makes the kernel send ARP requests for the address on the bridge.
async fn ask(address: Ipv4Addr, bridge: &str) -> io::Result<()> {
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).await?;
    socket.bind_device(Some(bridge.as_bytes()))?;
    socket.send_to(&[], (address, DISCARD)).await.map(drop)
}

/// Finds the owner of an address on a bridge in the text of the table.
fn owner<'a>(table: &'a str, address: Ipv4Addr, bridge: &str) -> Option<&'a str> {
    let address = address.to_string();
    table.lines().skip(1).find_map(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let &[ip, _, flags, mac, _, device] = fields.as_slice() else { return None };
        let flags = u32::from_str_radix(flags.trim_start_matches("0x"), 16).ok()?;
        (ip == address && device == bridge && flags & COMPLETE != 0).then_some(mac)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    const MAC: &str = "52:54:00:12:34:56";

    #[test]
    fn the_table_says_whose_an_address_is() {
        let table = "\
IP address       HW type     Flags       HW address            Mask     Device
10.9.0.5         0x1         0x2         52:54:00:12:34:56     *        br0
10.9.0.6         0x1         0x0         00:00:00:00:00:00     *        br0
10.9.0.7         0x1         0x6         52:54:00:00:00:07     *        br0
nonsense
";
        let owner = |address: &str, bridge| owner(table, address.parse().unwrap(), bridge);
        assert_eq!(owner("10.9.0.5", "br0"), Some(MAC));
        assert_eq!(owner("10.9.0.7", "br0"), Some("52:54:00:00:00:07"));
        for (address, bridge) in [("10.9.0.5", "br1"), ("10.9.0.6", "br0"), ("10.9.0.50", "br0")] {
            assert_eq!(owner(address, bridge), None, "{address} on {bridge}");
        }
    }

    #[tokio::test]
    async fn addresses_that_are_nobodys_are_refused_unasked() {
        for address in [
            "127.0.0.1",
            "127.8.8.8",
            "0.0.0.0",
            "0.1.2.3",
            "169.254.169.254",
            "224.0.0.1",
            "255.255.255.255",
        ] {
            let why = check_owner(address.parse().unwrap(), "no-bridge", MAC).await.unwrap_err();
            assert!(why.contains(address) && why.contains("not the address of one machine"), "{why}");
        }
    }

    /// A bridge with the host and one machine in it, which is a network namespace of its own.
    struct Bridge(String);

    impl Bridge {
        fn new() -> Option<Bridge> {
            let id = std::process::id() % 100_000;
            let (bridge, port, inside) = (format!("swb{id}"), format!("swp{id}"), format!("swi{id}"));
            let made = Bridge(bridge.clone());
            let commands = [
                format!("link add {bridge} type bridge"),
                format!("addr add 10.213.57.1/24 dev {bridge}"),
                format!("link set {bridge} up"),
                format!("netns add {bridge}"),
                format!("link add {port} type veth peer name {inside}"),
                format!("link set {port} master {bridge} up"),
                format!("link set {inside} address {MAC} netns {bridge}"),
                format!("-n {bridge} addr add 10.213.57.5/24 dev {inside}"),
                format!("-n {bridge} addr add 10.213.57.6/24 dev {inside}"),
                format!("-n {bridge} link set {inside} up"),
            ];
            for command in commands {
                let done = Command::new("ip").args(command.split(' ')).output();
                if !done.is_ok_and(|done| done.status.success()) {
                    spillway_testkit::skip(&format!("no bridge can be made here: ip {command}"));
                    return None;
                }
            }
            Some(made)
        }
    }

    impl Drop for Bridge {
        fn drop(&mut self) {
            for command in [["netns", "del"], ["link", "del"]] {
                let _ = Command::new("ip").args(command).arg(&self.0).output();
            }
        }
    }

    #[tokio::test]
    async fn an_address_is_its_own_if_its_card_answers_for_it() {
        let Some(bridge) = Bridge::new() else { return };
        let ask = |address: &str, mac| {
            let (address, bridge) = (address.parse().unwrap(), bridge.0.clone());
            async move { check_owner(address, &bridge, mac).await }
        };
        assert_eq!(ask("10.213.57.5", MAC).await, Ok(()));
        assert_eq!(ask("10.213.57.6", "52:54:00:12:34:56").await, Ok(()));
        // Another machine's, the host's own, one that nobody has, one that is elsewhere.
        let nobodys = ["10.213.57.1", "10.213.57.77", "198.51.100.9"];
        let (theirs, whys) = tokio::join!(
            ask("10.213.57.5", "52:54:00:00:00:01"),
            futures_util::future::join_all(nobodys.map(|address| ask(address, MAC)))
        );
        let theirs = theirs.unwrap_err();
        assert!(theirs.contains(MAC) && theirs.contains("not its own"), "{theirs}");
        for (address, why) in nobodys.into_iter().zip(whys) {
            let why = why.unwrap_err();
            assert!(why.contains(address) && why.contains("nobody"), "{why}");
        }
    }
}

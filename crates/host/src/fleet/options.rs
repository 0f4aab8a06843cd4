//! Options of the daemon for its fleet. Owns their form and defaults.
//!
//! Invariant: the address that other hosts are told is one that they can ask.

use super::etcd::{EtcdAddress, EtcdTls, EtcdUser};
use super::token::{self, EtcdAccess};
use crate::failure::Failure;
use crate::streaming::FleetPeers;
use anyhow::{Context, Result, bail};
use clap::Args;
use spillway_api::Name;
use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// Where the daemon listens for other hosts, if nothing else is said.
const DEFAULT_LISTEN: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), 9445);

/// How a host takes part in a fleet.
#[derive(Clone, Debug)]
pub struct FleetHostSettings {
    /// How etcd is reached, and the name of the fleet.
    pub etcd: EtcdAccess,
    /// Name of the host.
    pub host: Name,
    /// Zone of the host.
    pub zone: Name,
    /// Labels of the host.
    pub labels: BTreeMap<Name, String>,
    /// Address that the daemon listens on for other hosts.
    pub listen: SocketAddr,
    /// Address that other hosts are told, `HOST:PORT`.
    pub told: String,
    /// How it exchanges chunks of streamed images with other hosts; none: it does not.
    pub peers: Option<FleetPeers>,
}

/// Where other hosts get chunks of streamed images.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PeerListen {
    Nowhere,
    At(SocketAddr),
}

impl FromStr for PeerListen {
    type Err = String;

    fn from_str(text: &str) -> Result<PeerListen, String> {
        let address = || text.parse().map_err(|_| "give ADDR:PORT, or none".to_owned());
        if text == "none" { Ok(PeerListen::Nowhere) } else { Ok(PeerListen::At(address()?)) }
    }
}

/// Options of the daemon for its fleet.
#[derive(Args, Debug)]
pub struct FleetOptions {
    /// Take part in the fleet NAME, whose records are in this etcd, 3.4 or later
    #[arg(long, value_name = "etcd://HOST[:PORT],.../NAME")]
    fleet: Option<EtcdAddress>,
    /// Instead of --fleet: take part in the fleet of this token, which 'spillway fleet join-token' has printed on another host into this
    /// file. It has the address of etcd, and the certificate, key and password of that host for etcd
    #[arg(long, value_name = "FILE", conflicts_with = "fleet")]
    fleet_token: Option<PathBuf>,
    /// With a fleet: files for TLS with etcd (PEM): ca=FILE,cert=FILE,key=FILE; 'system': the authorities that the host trusts. With
    /// --fleet-token they count instead of those in the token
    #[arg(long, value_name = "FILES")]
    fleet_tls: Option<EtcdTls>,
    /// With a fleet: user of etcd, user=NAME,password=FILE. With --fleet-token it counts instead of the one in the token
    #[arg(long, value_name = "USER")]
    fleet_user: Option<EtcdUser>,
    /// With a fleet: address to listen on for the daemons of other hosts, which know each other by certificates that they make themselves
    /// [default: 0.0.0.0:9445]
    #[arg(long, value_name = "ADDR:PORT")]
    fleet_listen: Option<SocketAddr>,
    /// With a fleet: address at which other hosts reach this one, HOST:PORT [default: that of --fleet-listen, or the one from which etcd
    /// is reached]
    #[arg(long, value_name = "HOST:PORT")]
    fleet_address: Option<String>,
    /// With a fleet: address to listen on for other hosts that get chunks of streamed images from this one; none: this host sends none, and asks
    /// only registries [default: that of --fleet-listen with the next port]
    #[arg(long, value_name = "ADDR:PORT")]
    fleet_peer_listen: Option<PeerListen>,
    /// With a fleet: name of this host in the fleet [default: the host's name up to the first dot]
    #[arg(long, value_name = "NAME")]
    host_name: Option<Name>,
    /// With a fleet: zone of this host; hosts that may fail together, such as those of a rack, have the same [default: default]
    #[arg(long, value_name = "ZONE")]
    zone: Option<Name>,
    /// With a fleet: label of this host, for 'host_labels' of catalogs; may be given more than once
    #[arg(long = "label", value_name = "KEY=VALUE", value_parser = label)]
    labels: Vec<(Name, String)>,
}

fn label(text: &str) -> Result<(Name, String), String> {
    let (key, value) = text.split_once('=').ok_or("a label is KEY=VALUE")?;
    if value.chars().count() > 256 || value.chars().any(char::is_control) {
        return Err("the value of a label has at most 256 printable characters".into());
    }
    Ok((key.parse().map_err(|e| format!("{e}"))?, value.to_owned()))
}

impl FleetOptions {
    /// What the daemon is told; `None` without a fleet. So many bytes of chunks are sent to other hosts each second, at most.
    ///
    /// # Errors
    /// The name or the address of the host cannot be found out.
    pub fn settings(self, state: &Path, upload_bytes_per_second: u64) -> Result<Option<FleetHostSettings>> {
        let etcd = match (self.fleet, self.fleet_token) {
            (Some(address), _) => EtcdAccess { address, tls: self.fleet_tls, user: self.fleet_user },
            (None, Some(file)) => {
                token::take(&file, state, (self.fleet_tls, self.fleet_user)).context("--fleet-token")?
            }
            (None, None) => {
                let given = [
                    ("--fleet-tls", self.fleet_tls.is_some()),
                    ("--fleet-user", self.fleet_user.is_some()),
                    ("--fleet-listen", self.fleet_listen.is_some()),
                    ("--fleet-peer-listen", self.fleet_peer_listen.is_some()),
                    ("--fleet-address", self.fleet_address.is_some()),
                    ("--host-name", self.host_name.is_some()),
                    ("--zone", self.zone.is_some()),
                    ("--label", !self.labels.is_empty()),
                ];
                if let Some((option, _)) = given.iter().find(|(_, is_given)| *is_given) {
                    bail!(Failure::usage(format!(
                        "{option} is for a fleet: give --fleet or --fleet-token, too"
                    )));
                }
                return Ok(None);
            }
        };
        let host = match self.host_name {
            Some(host) => host,
            None => own_name().context("--host-name")?,
        };
        let own_listen = self.fleet_listen.unwrap_or(DEFAULT_LISTEN);
        let told = match self.fleet_address {
            Some(told) => told,
            None => told(own_listen, &etcd.address).context("--fleet-address")?,
        };
        check_told(&told, &etcd.address).context("--fleet-address")?;
        let listen = match self.fleet_peer_listen {
            Some(PeerListen::Nowhere) => None,
            Some(PeerListen::At(listen)) => Some(listen),
            None => Some(next_port(own_listen).context("--fleet-peer-listen")?),
        };
        let told_peers =
            |listen| FleetPeers { listen, told: told_with(&told, listen), upload_bytes_per_second };
        let peers = listen.map(told_peers);
        Ok(Some(FleetHostSettings {
            peers,
            etcd,
            host,
            zone: self.zone.map_or_else(|| "default".parse(), Ok).context("--zone")?,
            labels: self.labels.into_iter().collect(),
            listen: own_listen,
            told,
        }))
    }
}

/// Name of this host, up to the first dot.
fn own_name() -> Result<Name> {
    let name = rustix::system::uname();
    let name = name.nodename().to_string_lossy().to_lowercase();
    let first = name.split('.').next().unwrap_or_default();
    first
        .parse()
        .with_context(|| format!("the name of this host is '{name}': give it another one for the fleet"))
}

/// The address of the listener, or the one from which this host reaches etcd if it listens on all. A member on this host may be reached from a
/// loopback address, which is none for other hosts: then another member says more.
fn told(listen: SocketAddr, etcd: &EtcdAddress) -> Result<String> {
    if !listen.ip().is_unspecified() {
        return Ok(listen.to_string());
    }
    let (mut loopback, mut failure) = (None, None);
    for member in &etcd.members {
        match own_address(member) {
            Ok(address) if address.is_loopback() => loopback = loopback.or(Some(address)),
            Ok(address) => return Ok(SocketAddr::new(address, listen.port()).to_string()),
            Err(error) => failure = Some(error),
        }
    }
    match (loopback, failure) {
        (Some(address), None) => Ok(SocketAddr::new(address, listen.port()).to_string()),
        (_, Some(error)) => Err(error),
        (None, None) => bail!("etcd has no member"),
    }
}

/// The address of this host from which it reaches a member of etcd.
fn own_address(member: &str) -> Result<IpAddr> {
    // Nothing is sent: the kernel says by which of its addresses it would.
    let find = |any: IpAddr| -> std::io::Result<IpAddr> {
        let socket = UdpSocket::bind((any, 0))?;
        socket.connect(member)?;
        Ok(socket.local_addr()?.ip())
    };
    let address = find(Ipv4Addr::UNSPECIFIED.into()).or_else(|_| find(Ipv6Addr::UNSPECIFIED.into()));
    address.with_context(|| {
        format!("the address from which this host reaches {member} cannot be found out: give the one that other hosts reach it at")
    })
}

fn next_port(listen: SocketAddr) -> Result<SocketAddr> {
    match listen.port().checked_add(1) {
        Some(port) => Ok(SocketAddr::new(listen.ip(), port)),
        None => bail!("there is no port after that of --fleet-listen: give one, or none"),
    }
}

/// The address that other hosts are told of a listener, where this is the one of the daemon.
fn told_with(told: &str, listen: SocketAddr) -> String {
    let host = told.rsplit_once(':').map_or(told, |(host, _)| host);
    match listen.ip().is_unspecified() {
        true => format!("{host}:{}", listen.port()),
        false => listen.to_string(),
    }
}

fn check_told(told: &str, etcd: &EtcdAddress) -> Result<()> {
    let parts = told.rsplit_once(':').filter(|(host, _)| !host.is_empty());
    let parts = parts.and_then(|(host, port)| Some((host, port.parse::<u16>().ok()?)));
    let Some((host, _)) = parts.filter(|(_, port)| *port != 0) else { bail!("'{told}' is not HOST:PORT") };
    let address = host.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>();
    let is_loopback = host == "localhost" || address.is_ok_and(|address| address.is_loopback());
    let is_local = |member: &String| own_address(member).is_ok_and(|address| address.is_loopback());
    if is_loopback && !etcd.members.iter().all(is_local) {
        bail!("'{told}' is an address of each host itself: give the one that other hosts reach this one at");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Arguments {
        #[command(flatten)]
        fleet: FleetOptions,
    }

    fn parse(arguments: &[&str]) -> Result<Option<FleetHostSettings>, String> {
        let parsed = Arguments::try_parse_from(["spillwayd"].iter().chain(arguments));
        parsed
            .map_err(|e| e.to_string())
            .and_then(|all| all.fleet.settings(Path::new("/nowhere"), 1 << 20).map_err(|e| format!("{e:#}")))
    }

    #[test]
    fn a_fleet_is_enough_and_without_one_nothing_else_counts() {
        assert!(parse(&[]).unwrap().is_none());
        let fleet = ["--fleet", "etcd://127.0.0.1,127.0.0.2:4000/site", "--host-name", "a"];
        let settings = parse(&fleet).unwrap().unwrap();
        assert_eq!((settings.told.as_str(), settings.zone.as_str()), ("127.0.0.1:9445", "default"));
        assert_eq!(settings.etcd.address.members, ["127.0.0.1:2379", "127.0.0.2:4000"]);
        let more = ["--fleet-listen", "192.0.2.1:7", "--label", "gpu=yes", "--label", "rack=7"];
        let settings = parse(&[&fleet[..], &more].concat()).unwrap().unwrap();
        assert_eq!((settings.told.as_str(), settings.labels.len()), ("192.0.2.1:7", 2));
        let peers = |more: &[&str]| {
            let peers = parse(&[&fleet[..], more].concat()).unwrap().unwrap().peers;
            peers.map(|peers| (peers.listen.to_string(), peers.told))
        };
        let both = |listen: &str, told: &str| Some((listen.to_owned(), told.to_owned()));
        assert_eq!(peers(&[]), both("0.0.0.0:9446", "127.0.0.1:9446"));
        assert_eq!(peers(&["--fleet-address", "host-a:1"]), both("0.0.0.0:9446", "host-a:9446"));
        assert_eq!(peers(&["--fleet-listen", "192.0.2.1:7"]), both("192.0.2.1:8", "192.0.2.1:8"));
        let other = ["--fleet-address", "host-a:1", "--fleet-peer-listen", "192.0.2.7:7"];
        assert_eq!(peers(&other), both("192.0.2.7:7", "192.0.2.7:7"));
        assert_eq!(peers(&["--fleet-peer-listen", "none"]), None);
        let last = ["--fleet-listen", "192.0.2.1:65535"];
        assert!(parse(&[&fleet[..], &last].concat()).unwrap_err().contains("--fleet-peer-listen"));
        for alone in [
            ["--fleet-tls", "system"],
            ["--label", "a=b"],
            ["--host-name", "a"],
            ["--fleet-address", "a:1"],
            ["--fleet-listen", "192.0.2.1:7"],
            ["--zone", "rack-1"],
        ] {
            assert!(parse(&alone).unwrap_err().contains("is for a fleet"), "{alone:?}");
        }
        // Nothing of TEST-NET-1 is on this host. Where there is no way to it, its address cannot be found out.
        let both = ["--fleet", "etcd://127.0.0.1,192.0.2.1/site", "--host-name", "a"];
        for more in [&[][..], &["--fleet-address", "127.0.0.1:1"], &["--fleet-address", "localhost:1"]] {
            match parse(&[&both[..], more].concat()) {
                Ok(settings) => assert!(more.is_empty() && !settings.unwrap().told.starts_with("127.")),
                Err(why) => assert!(why.contains("that other hosts reach"), "{why}"),
            }
        }
        let listen = ["--fleet-listen", "127.0.0.1:7"];
        assert!(
            parse(&[&both[..], &listen].concat()).unwrap_err().contains("an address of each host itself")
        );
        for wrong in [["--fleet-address", "a"], ["--fleet-address", "a:0"], ["--label", "a"]] {
            assert!(parse(&[&fleet[..], &wrong].concat()).is_err(), "{wrong:?}");
        }
    }
}

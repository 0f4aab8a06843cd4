//! Address of a fleet: the members of its etcd, and its name. Owns its form, `etcd://HOST[:PORT][,HOST[:PORT]...]/FLEET`.
//!
//! Invariant: an address has at least one member, each only once, and each has a port.

use spillway_api::Name;
use std::fmt;
use std::net::Ipv6Addr;
use std::str::FromStr;

/// Port of etcd's clients, where an address has none.
const PORT: u16 = 2379;
/// Most members of an address. etcd itself advises 7 at most.
const MOST_MEMBERS: usize = 16;

/// Where the records of a fleet are kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EtcdAddress {
    /// Members of etcd as `HOST:PORT`; IPv6 addresses are in brackets.
    pub members: Vec<String>,
    /// Name of the fleet.
    pub fleet: Name,
}

/// Error for a text that is no address of a fleet: the text, and what is wrong with it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("'{0}' is no address of a fleet: {1}. Write etcd://HOST[:PORT],HOST[:PORT].../FLEET")]
pub struct EtcdAddressError(String, String);

impl FromStr for EtcdAddress {
    type Err = EtcdAddressError;

    fn from_str(text: &str) -> Result<EtcdAddress, EtcdAddressError> {
        let error = |why: String| EtcdAddressError(text.chars().take(256).collect(), why);
        let rest =
            text.strip_prefix("etcd://").ok_or_else(|| error("it does not begin with etcd://".into()))?;
        let (hosts, fleet) =
            rest.split_once('/').ok_or_else(|| error("the name of the fleet is missing".into()))?;
        let fleet = fleet.parse::<Name>().map_err(|why| error(why.to_string()))?;
        let mut members = Vec::new();
        for host in hosts.split(',') {
            let member = member(host).map_err(error)?;
            if members.contains(&member) {
                return Err(error(format!("{member} is there twice")));
            }
            members.push(member);
        }
        if members.len() > MOST_MEMBERS {
            return Err(error(format!("it has {} members, and {MOST_MEMBERS} are the most", members.len())));
        }
        Ok(EtcdAddress { members, fleet })
    }
}

impl fmt::Display for EtcdAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "etcd://{}/{}", self.members.join(","), self.fleet)
    }
}

/// Reads `HOST[:PORT]` and gives it a port.
fn member(text: &str) -> Result<String, String> {
    let (host, port) = match text.strip_prefix('[') {
        Some(rest) => {
            let (address, port) =
                rest.split_once(']').ok_or_else(|| format!("'{text}' has no closing bracket"))?;
            let address: Ipv6Addr = address.parse().map_err(|_| format!("'{address}' is no IPv6 address"))?;
            let port = match port {
                "" => None,
                port => Some(port.strip_prefix(':').ok_or_else(|| format!("'{port}' follows the bracket"))?),
            };
            (format!("[{address}]"), port)
        }
        None => match text.split_once(':') {
            Some((_, port)) if port.contains(':') => {
                return Err(format!("'{text}' looks like an IPv6 address: write it in brackets"));
            }
            Some((host, port)) => (host_name(host)?, Some(port)),
            None => (host_name(text)?, None),
        },
    };
    let port = match port {
        None => PORT,
        // A sign would be read as well.
        Some(port) if port.bytes().all(|b| b.is_ascii_digit()) => {
            port.parse().ok().filter(|port| *port != 0).ok_or_else(|| format!("'{port}' is no port"))?
        }
        Some(port) => return Err(format!("'{port}' is no port")),
    };
    Ok(format!("{host}:{port}"))
}

/// A name of DNS or an IPv4 address.
fn host_name(text: &str) -> Result<String, String> {
    let is_label = |label: &str| {
        let plain = |b: u8| b.is_ascii_alphanumeric() || b == b'-' || b == b'_';
        (1..=63).contains(&label.len()) && label.bytes().all(plain)
    };
    let name = text.strip_suffix('.').unwrap_or(text);
    if text.is_empty() {
        return Err("the name of a host is missing".into());
    }
    if text.len() > 253 || !name.split('.').all(is_label) {
        return Err(format!("'{text}' is no name of a host"));
    }
    Ok(text.to_ascii_lowercase())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_has_members_and_a_fleet() {
        for (text, members) in [
            ("etcd://a/site", "a:2379"),
            ("etcd://a.example.org:1,B,10.0.0.1:65535/site", "a.example.org:1,b:2379,10.0.0.1:65535"),
            ("etcd://[fd00::1],[FD00:0::2]:12/site", "[fd00::1]:2379,[fd00::2]:12"),
        ] {
            let address: EtcdAddress = text.parse().unwrap();
            assert_eq!((address.members.join(",").as_str(), address.fleet.as_str()), (members, "site"));
            assert_eq!(address.to_string().parse(), Ok(address));
        }
    }

    #[test]
    fn what_is_no_address_is_refused_with_the_reason() {
        for (text, why) in [
            ("http://a/site", "begin with etcd://"),
            ("etcd://a", "the name of the fleet is missing"),
            ("etcd://a/", "'' is no name"),
            ("etcd://a/Site", "'Site' is no name"),
            ("etcd://a/b/c", "'b/c' is no name"),
            ("etcd:///site", "name of a host is missing"),
            ("etcd://a,,b/site", "name of a host is missing"),
            ("etcd://a,a:2379/site", "a:2379 is there twice"),
            ("etcd://a:0/site", "'0' is no port"),
            ("etcd://a:+1/site", "'+1' is no port"),
            ("etcd://a:65536/site", "'65536' is no port"),
            ("etcd://a:/site", "'' is no port"),
            ("etcd://fd00::1/site", "write it in brackets"),
            ("etcd://[fd00::1/site", "no closing bracket"),
            ("etcd://[fd00::1]2/site", "'2' follows the bracket"),
            ("etcd://[10.0.0.1]/site", "no IPv6 address"),
            ("etcd://u:p@a/site", "is no port"),
            ("etcd://a b/site", "no name of a host"),
        ] {
            let error = text.parse::<EtcdAddress>().unwrap_err().to_string();
            assert!(error.contains(why) && error.contains("Write etcd://HOST"), "{text}: {error}");
        }
        let many: Vec<String> = (0..17).map(|i| format!("h{i}")).collect();
        assert!(format!("etcd://{}/site", many.join(",")).parse::<EtcdAddress>().is_err());
    }
}

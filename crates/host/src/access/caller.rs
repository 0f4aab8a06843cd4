//! Who asks: the user of a local process, or the owner of a token. Owns the roles and how a caller is written.
//!
//! Invariant: a caller was identified by the kernel (unix socket) or by a token (TCP), never by what the request says.

use std::fmt;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::Arc;

/// What a caller may ask. Each role includes the ones before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Role {
    /// To see.
    Read,
    /// To start, stop, reset, claim and release machines.
    Operate,
    /// Everything.
    Admin,
}

impl Role {
    /// The word of files, messages and the audit log.
    pub fn word(self) -> &'static str {
        match self {
            Role::Read => "read",
            Role::Operate => "operate",
            Role::Admin => "admin",
        }
    }

    /// The role that a word names.
    pub fn of(word: &str) -> Option<Role> {
        [Role::Read, Role::Operate, Role::Admin].into_iter().find(|role| role.word() == word)
    }
}

/// Where a connection comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PeerAddress {
    /// The unix socket: user and process, as the kernel reports them. The process may have ended since.
    Local {
        /// The user.
        uid: Option<u32>,
        /// The process that has opened the connection.
        pid: Option<i32>,
    },
    /// TCP.
    Remote(IpAddr),
}

impl PeerAddress {
    /// A source of which connections are counted together: a user; an IPv4 address; an IPv6 network of 64 bits, since
    /// one host may have all addresses of it.
    pub fn counted(self) -> PeerAddress {
        match self {
            PeerAddress::Local { uid, .. } => PeerAddress::Local { uid, pid: None },
            PeerAddress::Remote(address) => PeerAddress::Remote(match address.to_canonical() {
                IpAddr::V6(v6) => IpAddr::V6(Ipv6Addr::from_bits(v6.to_bits() & (u128::MAX << 64))),
                v4 => v4,
            }),
        }
    }
}

impl fmt::Display for PeerAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PeerAddress::Local { .. } => f.write_str("local"),
            PeerAddress::Remote(address) => address.to_canonical().fmt(f),
        }
    }
}

/// Who asks, what they may, and from where.
#[derive(Clone, Debug)]
pub struct Caller {
    /// The token's name, or `uid 0`.
    pub name: Arc<str>,
    /// What they may ask.
    pub role: Role,
    /// Where the connection comes from.
    pub source: PeerAddress,
}

impl fmt::Display for Caller {
    /// For people: `uid 0`, `ci from 192.0.2.1`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.source {
            PeerAddress::Local { .. } => f.write_str(&self.name),
            PeerAddress::Remote(_) => write!(f, "{} from {}", self.name, self.source),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_is_counted_once_whatever_addresses_it_has() {
        let counted = |text: &str| PeerAddress::Remote(text.parse().unwrap()).counted();
        assert_eq!(counted("2001:db8::1"), counted("2001:db8::ffff:1"));
        assert_ne!(counted("2001:db8::1"), counted("2001:db8:0:1::1"));
        assert_eq!(counted("::ffff:192.0.2.1"), counted("192.0.2.1"));
        assert_ne!(counted("192.0.2.2"), counted("192.0.2.1"));
        let local = |uid, pid| PeerAddress::Local { uid: Some(uid), pid: Some(pid) }.counted();
        assert_eq!(local(0, 1), local(0, 2));
        assert_ne!(local(0, 1), local(1, 1));
    }

    #[test]
    fn roles_include_the_lower_ones() {
        assert!(Role::Read < Role::Operate && Role::Operate < Role::Admin);
        assert_eq!((Role::of("admin"), Role::of("root")), (Some(Role::Admin), None));
    }
}

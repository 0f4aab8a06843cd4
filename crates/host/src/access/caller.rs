//! Callers of the API: the user of a local process, the owner of a token, or the user of another host. Owns the roles and the textual
//! forms.
//!
//! Invariant: a caller is identified by the kernel (unix socket), by a token (TCP) or by the daemon of another host (fleet), never by the
//! content of its request.

use std::fmt;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::Arc;
use std::time::Duration;

/// Role of a caller. Each role includes those before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Role {
    /// May read everything but secrets.
    Read,
    /// May start, stop, reset, claim and release machines, and use their consoles and guests.
    Operate,
    /// May do everything.
    Admin,
}

impl Role {
    /// Word for the role in files, messages and the audit log.
    pub fn word(self) -> &'static str {
        match self {
            Role::Read => "read",
            Role::Operate => "operate",
            Role::Admin => "admin",
        }
    }

    /// Parses the word for a role.
    pub fn of(word: &str) -> Option<Role> {
        [Role::Read, Role::Operate, Role::Admin].into_iter().find(|role| role.word() == word)
    }
}

/// Origin of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PeerAddress {
    /// The unix socket, with user and process as the kernel reports them. The process may have ended since.
    Local {
        /// User id.
        uid: Option<u32>,
        /// Id of the process that opened the connection.
        pid: Option<i32>,
    },
    /// TCP, from this address.
    Remote(IpAddr),
}

impl PeerAddress {
    /// Origin whose connections are counted together: a user; an IPv4 address; an IPv6 network of 64 bits, since one host
    /// may use all of its addresses.
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

/// Identity, role and origin of a caller.
#[derive(Clone, Debug)]
pub struct Caller {
    /// Name of the token, or `uid 0`; of a user of another host `ci (at host-a)`.
    pub name: Arc<str>,
    /// Role of the caller.
    pub role: Role,
    /// Origin of the connection.
    pub source: PeerAddress,
    /// How the caller has shown who it is.
    pub proof: Proof,
}

/// How a caller has shown who it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Proof {
    /// It has opened the unix socket.
    Socket,
    /// A token.
    Token,
    /// The cookie of a session, which lasts so long.
    Session {
        /// The rest of its time.
        left: Duration,
    },
    /// The daemon of another host of the fleet has said so.
    Member,
}

impl fmt::Display for Caller {
    /// Text for people: `uid 0`, `ci from 192.0.2.1`.
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

//! Address of a daemon: a socket or a TCP port. Owns the syntax.
//!
//! Invariant: nothing is sent without encryption over TCP: such an address is refused.

use hyper::Uri;
use std::ffi::OsStr;
use std::fmt;
use std::path::PathBuf;
use tokio_rustls::rustls::pki_types::ServerName;

/// Default port of an https address.
const HTTPS: u16 = 443;

/// Address of a daemon.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    /// The daemon listens on this unix socket.
    Socket(PathBuf),
    /// The daemon listens on this TCP port, with TLS.
    Remote(HostPort),
}

/// A host and a port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostPort {
    pub(super) host: ServerName<'static>,
    pub(super) port: u16,
}

/// Error for a text that is not an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AddressError {
    /// The scheme would send the token without encryption.
    #[error("http:// would show the token to all who listen on the way: say https://HOST:PORT")]
    Clear,
    /// The scheme is not supported.
    #[error("it takes the path of a socket, or https://HOST:PORT")]
    Kind,
    /// The text is not a host and a port.
    #[error("it takes https://HOST:PORT and nothing else")]
    Host,
    /// The text contains a user or a password, which other users would see in the list of processes.
    #[error("who asks is said by a token, not in the address")]
    User,
}

impl Address {
    /// Parses an address. A text that is not a URL is a path.
    pub fn parse(text: &OsStr) -> Result<Address, AddressError> {
        let url = text.to_str().and_then(|text| Some((text, text.split_once("://")?.0)));
        let plain = |scheme: &str| scheme.bytes().all(|b| b.is_ascii_alphanumeric() || b"+-.".contains(&b));
        match url {
            Some((text, scheme)) if scheme.eq_ignore_ascii_case("https") => {
                HostPort::parse(text).map(Address::Remote)
            }
            Some((_, scheme)) if scheme.eq_ignore_ascii_case("http") => Err(AddressError::Clear),
            Some((_, scheme)) if plain(scheme) => Err(AddressError::Kind),
            _ => Ok(Address::Socket(text.into())),
        }
    }
}

impl HostPort {
    fn parse(url: &str) -> Result<HostPort, AddressError> {
        let url: Uri = url.parse().map_err(|_| AddressError::Host)?;
        let authority = url.authority().ok_or(AddressError::Host)?;
        if authority.as_str().contains('@') {
            return Err(AddressError::User);
        }
        let host = authority.host();
        let port = match authority.as_str().strip_prefix(host) {
            Some("") => Some(HTTPS),
            Some(port) => port.strip_prefix(':').and_then(|port| port.parse().ok()),
            None => None,
        };
        // IPv6 addresses are written in brackets.
        let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
        let host = ServerName::try_from(host.to_owned()).ok();
        match (host, port, url.path(), url.query()) {
            (Some(host), Some(port), "" | "/", None) => Ok(HostPort { host, port }),
            _ => Err(AddressError::Host),
        }
    }

    /// Formats the value of the header `Host`.
    pub(super) fn authority(&self) -> String {
        let HostPort { host, port } = self;
        match host {
            ServerName::IpAddress(_) if host.to_str().contains(':') => format!("[{}]:{port}", host.to_str()),
            _ => format!("{}:{port}", host.to_str()),
        }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Address::Socket(path) => path.display().fmt(f),
            Address::Remote(remote) => remote.fmt(f),
        }
    }
}

impl fmt::Display for HostPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "https://{}", self.authority())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::ffi::OsStrExt;

    fn parse(text: &str) -> Result<Address, AddressError> {
        Address::parse(OsStr::new(text))
    }

    #[test]
    fn an_address_is_a_path_or_a_host_and_port() {
        for (text, shown) in [
            ("https://host1:9443", "https://host1:9443"),
            ("HTTPS://host1.example.org/", "https://host1.example.org:443"),
            ("https://192.0.2.1:9443", "https://192.0.2.1:9443"),
            ("https://[2001:db8::1]:9443", "https://[2001:db8::1]:9443"),
            ("https://[::1]", "https://[::1]:443"),
        ] {
            let address = parse(text).unwrap();
            assert!(matches!(address, Address::Remote(_)), "{text}");
            assert_eq!(address.to_string(), shown);
        }
        for path in ["/run/spillway/spillwayd.sock", "sock", "./http://x", "/a/https://b:1", "host:9443"] {
            assert_eq!(parse(path), Ok(Address::Socket(path.into())));
        }
        let bytes = OsStr::from_bytes(b"https://\xff:1");
        assert_eq!(Address::parse(bytes), Ok(Address::Socket(bytes.into())));
    }

    #[test]
    fn what_is_none_is_refused_with_a_reason() {
        for (text, why) in [
            ("http://host1:9443", AddressError::Clear),
            ("HTTP://host1", AddressError::Clear),
            ("ssh://host1", AddressError::Kind),
            ("unix:///run/x", AddressError::Kind),
            ("https://", AddressError::Host),
            ("https://host1:", AddressError::Host),
            ("https://host1:0x1", AddressError::Host),
            ("https://host1:65536", AddressError::Host),
            ("https://host1:9443/v1", AddressError::Host),
            ("https://host1:9443/?a=b", AddressError::Host),
            ("https://host1:9443:1", AddressError::Host),
            ("https://ho st:1", AddressError::Host),
            ("https://[::1:9443", AddressError::Host),
            ("https://-/", AddressError::Host),
            ("https://me:secret@host1:9443", AddressError::User),
        ] {
            assert_eq!(parse(text), Err(why), "{text}");
        }
    }
}

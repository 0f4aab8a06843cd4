//! Who has made a request that came from another host: that host's daemon says which of its users it is for. Owns the form of the header.
//!
//! Invariant: the header counts on connections of members only, as long as they are members. What it says is bounded, and a name from it
//! cannot be taken for one of this host's.

use super::identity::CertificateDigest;
use super::members::Members;
use crate::access::caller::{Caller, Proof, Role};
use crate::error::HostError;
use axum::http::{HeaderMap, HeaderValue};
use spillway_api::{ErrorCode, Name};

/// Header with the role and the name of the user: `operate ci`. Without it, the other daemon asks for itself.
pub const CALLER_HEADER: &str = "spillway-caller";
/// Longest name of a user, as of a token.
const MOST_NAME_BYTES: usize = 64;
/// Name of a daemon that asks for itself.
const DAEMON: &str = "spillwayd";

/// Formats the header for a caller of this host; `None` if the caller is itself from another host.
pub fn caller_value(caller: &Caller) -> Option<HeaderValue> {
    let is_own = caller.proof != Proof::Member && is_name(&caller.name);
    let value = || HeaderValue::try_from(format!("{} {}", caller.role.word(), caller.name)).ok();
    is_own.then(value).flatten()
}

/// Names of tokens, and of users of the unix socket (`uid 0`).
fn is_name(text: &str) -> bool {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.@ ".contains(&byte);
    (1..=MOST_NAME_BYTES).contains(&text.len()) && text.bytes().all(is_plain) && text.trim() == text
}

/// The host at the other end of a connection, which has shown a member's certificate.
pub struct MemberPeer {
    /// Name of the host.
    pub host: Name,
    certificate: CertificateDigest,
    members: Members,
}

impl MemberPeer {
    /// The member that has this certificate, if there is one.
    pub(super) fn of(certificate: CertificateDigest, members: &Members) -> Option<MemberPeer> {
        let host = members.of_certificate(certificate)?;
        Some(MemberPeer { host, certificate, members: members.clone() })
    }

    /// Returns name and role of the user that a request is made for: `ci (at host-a)`.
    ///
    /// # Errors
    /// The host is no member any more, or its header cannot be understood.
    pub fn caller(&self, headers: &HeaderMap) -> Result<(String, Role), HostError> {
        let refused = |message| Err(HostError::new(ErrorCode::Unauthenticated, message));
        let host = &self.host;
        if self.members.of_certificate(self.certificate).as_ref() != Some(host) {
            return refused(format!("{host} is not a member of the fleet any more"));
        }
        let mut values = headers.get_all(CALLER_HEADER).iter();
        let (role, name) = match (values.next(), values.next()) {
            (None, _) => (Role::Read, DAEMON),
            (Some(value), None) => {
                let parts = value.to_str().ok().and_then(|text| text.split_once(' '));
                let parts = parts.and_then(|(role, name)| Some((Role::of(role)?, name)));
                let Some(parts) = parts.filter(|(_, name)| is_name(name)) else {
                    return refused(format!("{host} does not say who asks: {CALLER_HEADER} is 'ROLE NAME'"));
                };
                parts
            }
            (Some(_), Some(_)) => return refused(format!("{host} says twice who asks: {CALLER_HEADER}")),
        };
        Ok((format!("{name} (at {host})"), role))
    }

    /// Whether who has made a request has the role now.
    pub fn may(&self, headers: &HeaderMap, role: Role) -> bool {
        self.caller(headers).is_ok_and(|(_, own)| own >= role)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::access::caller::PeerAddress;
    use crate::fleet::door::Member;
    use std::collections::BTreeMap;

    fn peer() -> MemberPeer {
        let certificate: CertificateDigest = "1f".repeat(32).parse().unwrap();
        let (host, members): (Name, _) = ("host-a".parse().unwrap(), Members::default());
        let member = Member { address: "h:1".into(), certificate, epoch: 1, peers: None };
        members.replace(BTreeMap::from([(host, member)]));
        MemberPeer::of(certificate, &members).unwrap()
    }

    fn headers(values: &[&str]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for value in values {
            headers.append(CALLER_HEADER, HeaderValue::from_bytes(value.as_bytes()).unwrap());
        }
        headers
    }

    #[test]
    fn a_user_is_named_with_its_host() {
        let peer = peer();
        let caller = |value| peer.caller(&headers(&[value])).unwrap();
        assert_eq!(caller("operate ci"), ("ci (at host-a)".into(), Role::Operate));
        assert_eq!(caller("admin uid 0"), ("uid 0 (at host-a)".into(), Role::Admin));
        assert_eq!(peer.caller(&HeaderMap::new()).unwrap(), ("spillwayd (at host-a)".into(), Role::Read));
        assert!(peer.may(&headers(&["operate ci"]), Role::Operate));
        assert!(!peer.may(&headers(&["operate ci"]), Role::Admin));
    }

    #[test]
    fn what_is_no_user_is_refused() {
        let peer = peer();
        let long = format!("read {}", "a".repeat(65));
        for value in [
            "",
            "admin",
            "admin ",
            "root ci",
            "ADMIN ci",
            "read  ci",
            "read ci (at host-b)",
            "read c\u{e9}",
            "read a\tb",
            &long,
        ] {
            let refused = peer.caller(&headers(&[value])).unwrap_err();
            assert_eq!(refused.code, ErrorCode::Unauthenticated, "{value:?}");
        }
        assert!(peer.caller(&headers(&["read ci", "admin ci"])).is_err());
        peer.members.replace(BTreeMap::new());
        assert!(peer.caller(&headers(&["read ci"])).unwrap_err().message.contains("not a member"));
    }

    #[test]
    fn a_caller_of_another_host_has_no_header() {
        let source = PeerAddress::Local { uid: Some(0), pid: None };
        let caller = |name: &str, proof| Caller { name: name.into(), role: Role::Admin, source, proof };
        assert_eq!(caller_value(&caller("uid 0", Proof::Socket)).unwrap(), "admin uid 0");
        assert_eq!(caller_value(&caller("ci", Proof::Member)), None);
        assert_eq!(caller_value(&caller("ci (at host-b)", Proof::Token)), None);
    }
}

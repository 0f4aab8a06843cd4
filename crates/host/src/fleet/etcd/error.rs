//! Errors of the records' store, and why a member of etcd does not serve. Owns their words: what failed, where, why, and what to do.
//!
//! Invariant: only [`FleetStoreError::Unanswered`] leaves open whether a transaction was applied. After any other it was not.

use std::fmt::Write;
use std::path::PathBuf;
use std::time::Duration;

/// Least time between two connections that are made because the member does not take the credentials of this host: etcd takes long to compare
/// a password, and nobody may have changed it.
const CREDENTIALS_PAUSE: Duration = Duration::from_secs(3);
/// The same because the user may not do what it asks for. Each new connection lists all records again.
const PERMISSION_PAUSE: Duration = Duration::from_secs(300);

/// Why a member of etcd does not do what it is asked.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MemberFailure {
    /// It does not answer within a request's time.
    #[error("does not answer within {} ms", .0.as_millis())]
    Silent(Duration),
    /// There is no connection to it, or it has ended.
    #[error("cannot be reached: {0}")]
    Unreachable(String),
    /// It closes connections before it has answered anything.
    #[error(
        "closes the connection of this host at once ({0}). Does it want TLS (--fleet-tls), none, or a certificate of this host \
         (--fleet-tls ca=FILE,cert=FILE,key=FILE)?"
    )]
    Closed(String),
    /// Its certificate is not signed by a known authority, or for another name, or has expired.
    #[error(
        "shows a certificate that is not trusted: {0}. Is 'ca' of --fleet-tls the authority of etcd's certificates, and is the certificate for this name?"
    )]
    UntrustedCertificate(String),
    /// It does not accept this host's certificate.
    #[error(
        "refuses this host: {0}. etcd may want a certificate of its clients: --fleet-tls ca=FILE,cert=FILE,key=FILE"
    )]
    CertificateRefused(String),
    /// It does not speak TLS.
    #[error("does not speak TLS: is it etcd's port for clients, and does etcd listen at https://?")]
    NoTls,
    /// A file of the settings cannot be read or used.
    #[error("was not asked: {path} {why}", path = .0.display(), why = .1)]
    File(PathBuf, String),
    /// It has no leader: elections go on, or it is cut off from the majority.
    #[error("has no leader: it is cut off from most other members, or they elect one")]
    NoLeader,
    /// It has answered with an earlier term than other members: it has stood still, and does not know of their election.
    #[error("has stood still: it answers for term {0}, and others were at {1}")]
    EarlierTerm(u64, u64),
    /// User, password, or the rights of the user.
    #[error(
        "refuses the user of this host: {0}. Look at --fleet-user, and at 'etcdctl user get' and 'etcdctl role get'"
    )]
    Denied(String),
    /// Its version is too old.
    #[error("is etcd {0}: 3.4 or later is needed")]
    TooOld(String),
    /// It is kine, not etcd.
    #[error(
        "is kine, not etcd (its answers have no member): kine ends leases that are renewed, and so every host would be lost. Use etcd 3.4 or later"
    )]
    Kine,
    /// It answers with an error of another kind: its code of gRPC and its words.
    #[error("answers: {1}")]
    Answer(i32, String),
}

impl MemberFailure {
    /// Whether another member may do better.
    pub fn is_of_the_member(&self) -> bool {
        // Codes that are about the request: INVALID_ARGUMENT, NOT_FOUND, ALREADY_EXISTS, RESOURCE_EXHAUSTED, FAILED_PRECONDITION,
        // OUT_OF_RANGE.
        !matches!(self, MemberFailure::Denied(_) | MemberFailure::Answer(3 | 5 | 6 | 8 | 9 | 11, _))
    }

    /// Least age of a connection that another one may do better than. For the new one the files with certificates and passwords are read again,
    /// and a token is asked for. None: another one does no better.
    pub fn renews_after(&self) -> Option<Duration> {
        match self {
            // What a user may do changes without a new connection; only a certificate of another user needs one.
            MemberFailure::Denied(why) if why.contains("permission denied") => Some(PERMISSION_PAUSE),
            MemberFailure::Denied(_) => Some(CREDENTIALS_PAUSE),
            // INVALID_ARGUMENT: users or roles have changed since the token was given.
            MemberFailure::Answer(3, why) if why.contains("revision of auth store is old") => {
                Some(CREDENTIALS_PAUSE)
            }
            _ => None,
        }
    }

    /// Whether it stays so until somebody changes something.
    pub fn is_permanent(&self) -> bool {
        use MemberFailure::{CertificateRefused, Denied, File, Kine, NoTls, TooOld, UntrustedCertificate};
        matches!(
            self,
            UntrustedCertificate(_) | CertificateRefused(_) | NoTls | File(..) | Denied(_) | TooOld(_) | Kine
        )
    }
}

/// Error of the records' store.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FleetStoreError {
    /// No member of etcd serves. Nothing was sent, or nothing was applied.
    #[error("no member of etcd answers: {}", list(.0))]
    NoMember(Vec<(String, MemberFailure)>),
    /// The answer did not come: whether the transaction was applied is not known.
    #[error("etcd: {0} {1}. Whether the change was made is not known: the records tell")]
    Unanswered(String, MemberFailure),
    /// The user of this host may not do this.
    #[error("etcd: {0} {1}")]
    Denied(String, MemberFailure),
    /// The database of etcd is full. It takes no writes until somebody has made space.
    #[error(
        "etcd: {0} takes no writes: its database has reached its quota. To get out: 'etcdctl compact REVISION' with the present \
         revision of 'etcdctl endpoint status -w fields', 'etcdctl defrag' for each member, then 'etcdctl alarm disarm'; or \
         restart etcd with a larger --quota-backend-bytes. --auto-compaction-retention=1h keeps it from filling again"
    )]
    QuotaExceeded(String),
    /// This host has no lease yet, and a record was to have it.
    #[error(
        "this host has no lease of etcd yet: it was not granted one since the daemon started, or has lost it"
    )]
    NoLease,
    /// The lease of this host has ended, and a record was to have it.
    #[error("etcd: {0} has ended the lease of this host; the daemon asks for another one")]
    LeaseEnded(String),
    /// The transaction is larger than etcd takes.
    #[error(
        "etcd: {0} takes no transaction of this size ({1}): its --max-request-bytes and --max-txn-ops limit it"
    )]
    TooLarge(String, String),
    /// The transaction is none that can be sent.
    #[error("a transaction is wrong: {0}")]
    Invalid(String),
    /// etcd has refused the request for another reason.
    #[error("etcd: {0} {1}")]
    Refused(String, MemberFailure),
}

impl FleetStoreError {
    /// Whether it stays so until somebody changes the settings, of this daemon or of etcd.
    pub fn is_permanent(&self) -> bool {
        match self {
            FleetStoreError::NoMember(members) => members.iter().all(|(_, why)| why.is_permanent()),
            FleetStoreError::Denied(..) | FleetStoreError::TooLarge(..) | FleetStoreError::Invalid(_) => true,
            _ => false,
        }
    }
}

fn list(members: &[(String, MemberFailure)]) -> String {
    let mut text = String::new();
    for (member, failure) in members {
        let _ = write!(text, "{}{member} {failure}", if text.is_empty() { "" } else { "; " });
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_connection_is_made_at_once_only_for_other_credentials() {
        let denied = |why: &str| MemberFailure::Denied(why.into()).renews_after();
        assert_eq!(denied("etcdserver: invalid auth token"), Some(CREDENTIALS_PAUSE));
        assert_eq!(denied("etcdserver: permission denied"), Some(PERMISSION_PAUSE));
        let old = MemberFailure::Answer(3, "etcdserver: revision of auth store is old".into());
        assert_eq!(old.renews_after(), Some(CREDENTIALS_PAUSE));
        assert_eq!(MemberFailure::Answer(3, "etcdserver: key is not provided".into()).renews_after(), None);
    }
}

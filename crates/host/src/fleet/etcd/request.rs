//! Requests to a member of etcd: how long they may take, and what their errors mean.
//!
//! Invariant: every request ends within its time.

use super::error::{FleetStoreError, MemberFailure};
use std::error::Error;
use std::io;
use std::time::Duration;
use tokio_rustls::rustls;

/// Time of a request.
pub const REQUEST_TIME: Duration = Duration::from_secs(2);

/// Sends a request and waits for its answer, for this long.
pub async fn ask<T>(
    time: Duration,
    request: impl Future<Output = Result<T, etcd_client::Error>>,
) -> Result<T, MemberFailure> {
    match tokio::time::timeout(time, request).await {
        Ok(answer) => answer.map_err(|error| match failure(error) {
            // It has answered before: no setting is wrong.
            MemberFailure::Closed(why) => MemberFailure::Unreachable(why),
            failure => failure,
        }),
        Err(_) => Err(MemberFailure::Silent(time)),
    }
}

/// What an error of the client says about the member.
pub fn failure(error: etcd_client::Error) -> MemberFailure {
    match error {
        etcd_client::Error::GRpcStatus(status) => {
            // What a member has answered has no source.
            if let Some(source) = status.source() {
                return of_connection(source);
            }
            of_answer(status.code() as i32, status.message())
        }
        etcd_client::Error::TransportError(error) => of_connection(&error),
        error => MemberFailure::Unreachable(error.to_string()),
    }
}

fn of_answer(code: i32, message: &str) -> MemberFailure {
    let message = short(message);
    if message.contains("etcdserver: no leader") {
        return MemberFailure::NoLeader;
    }
    // PERMISSION_DENIED, UNAUTHENTICATED; and what etcd says as an invalid argument.
    let is_denied = matches!(code, 7 | 16)
        || [
            "authentication failed",
            "user name is empty",
            "authentication is not enabled",
            "user name not found",
        ]
        .iter()
        .any(|text| message.contains(text));
    if is_denied { MemberFailure::Denied(message) } else { MemberFailure::Answer(code, message) }
}

/// Walks through the causes for what a person can do something about.
fn of_connection(error: &(dyn Error + 'static)) -> MemberFailure {
    let mut cause = Some(error);
    let mut last = error;
    while let Some(error) = cause {
        let of_tls = error.downcast_ref::<rustls::Error>().or_else(|| {
            error
                .downcast_ref::<io::Error>()
                .and_then(|error| error.get_ref()?.downcast_ref::<rustls::Error>())
        });
        match of_tls {
            Some(rustls::Error::InvalidCertificate(_)) => {
                return MemberFailure::UntrustedCertificate(
                    of_tls.map(ToString::to_string).unwrap_or_default(),
                );
            }
            Some(rustls::Error::AlertReceived(alert)) => {
                return MemberFailure::CertificateRefused(format!("{alert:?}"));
            }
            Some(rustls::Error::InvalidMessage(_)) => return MemberFailure::NoTls,
            Some(_) | None => {}
        }
        last = error;
        cause = error.source();
    }
    let why = short(&last.to_string());
    // HTTP/2 passes on the words alone.
    if why.contains("received fatal alert") {
        return MemberFailure::CertificateRefused(why);
    }
    // How a connection ends, in the words of the system and of TLS, and in those of HTTP/2, which keeps only the kind of an error.
    let ends = [
        "connection closed",
        "connection reset",
        "connection aborted",
        "handshake eof",
        "broken pipe",
        "unexpected end of file",
    ];
    let words = why.to_lowercase();
    match ends.iter().any(|end| words.contains(end)) {
        true => MemberFailure::Closed(why),
        false => MemberFailure::Unreachable(why),
    }
}

/// What etcd says, within limits.
fn short(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).take(300).collect()
}

/// The error of a transaction that a member has not carried out as far as it has said.
pub fn of_transaction(member: &str, failure: MemberFailure) -> FleetStoreError {
    let member = member.to_owned();
    match failure {
        MemberFailure::NoLeader => FleetStoreError::NoMember(vec![(member, failure)]),
        MemberFailure::Denied(_) => FleetStoreError::Denied(member, failure),
        MemberFailure::Answer(code, ref text) => match code {
            8 if text.contains("database space exceeded") => FleetStoreError::QuotaExceeded(member),
            5 if text.contains("lease not found") => FleetStoreError::LeaseEnded(member),
            3 | 8
                if text.contains("too large")
                    || text.contains("too many operations")
                    || text.contains("larger than max") =>
            {
                FleetStoreError::TooLarge(member, text.clone())
            }
            3 | 5 | 8 | 9 | 11 => FleetStoreError::Refused(member, failure),
            _ => FleetStoreError::Unanswered(member, failure),
        },
        failure => FleetStoreError::Unanswered(member, failure),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_etcd_answers_says_whether_a_transaction_was_applied() {
        let error = |code, text| of_transaction("a:1", of_answer(code, text));
        assert_eq!(
            error(8, "etcdserver: mvcc: database space exceeded"),
            FleetStoreError::QuotaExceeded("a:1".into())
        );
        assert_eq!(
            error(5, "etcdserver: requested lease not found"),
            FleetStoreError::LeaseEnded("a:1".into())
        );
        assert!(matches!(error(3, "etcdserver: request is too large"), FleetStoreError::TooLarge(..)));
        assert!(matches!(
            error(3, "etcdserver: too many operations in txn request"),
            FleetStoreError::TooLarge(..)
        ));
        assert!(matches!(error(8, "etcdserver: too many requests"), FleetStoreError::Refused(..)));
        assert!(matches!(error(7, "etcdserver: permission denied"), FleetStoreError::Denied(..)));
        assert!(matches!(
            error(3, "etcdserver: authentication failed, invalid user ID or password"),
            FleetStoreError::Denied(..)
        ));
        assert!(matches!(error(14, "etcdserver: no leader"), FleetStoreError::NoMember(_)));
        for text in
            ["etcdserver: request timed out", "etcdserver: leader changed", "etcdserver: server stopped"]
        {
            assert!(matches!(error(14, text), FleetStoreError::Unanswered(..)), "{text}");
        }
        assert!(matches!(error(2, "\u{7}who knows"), FleetStoreError::Unanswered(..)));
    }
}

//! Releases of claims whose clients could not be told of them. Owns how often a host is asked for that.
//!
//! Invariant: a host is asked until it has answered, or is no host of the fleet any more. That is done for at most [`MOST_UNDONE`] claims at the
//! same time; for others a host is asked once.

use super::{ANSWER, FleetClaims, FleetUser, user_request};
use crate::fleet::door::HostClientError;
use crate::machines::ClaimSelector;
use crate::work::blocking;
use axum::body::Bytes;
use axum::http::{Request, StatusCode};
use spillway_api::FleetClaim;
use std::time::Duration;

/// Claims that are undone at the same time at hosts that do not answer.
pub const MOST_UNDONE: usize = 1024;
/// Time until a host that has not answered is asked again. Each further pause is twice as long.
const FIRST_PAUSE: Duration = Duration::from_millis(500);
/// Longest pause.
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

impl FleetClaims {
    /// Releases a claim whose client could not be told of it. A host that counts as lost is asked, too: it comes back with its claims.
    pub async fn undo(&self, user: &FleetUser, claim: &FleetClaim) {
        if claim.host == self.0.door.host {
            return self.undo_here(claim).await;
        }
        let path = format!("/v1/machines/{}/claim?claim={}", claim.machine.machine.name, claim.claim);
        let turn = self.0.undone.try_acquire().ok();
        let mut pause = FIRST_PAUSE;
        while let Some(request) = user_request(user, Request::delete(&path)) {
            let answer = self.0.door.client.whole(&claim.host, request, ANSWER).await;
            if is_over(&answer) || turn.is_none() {
                return;
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }

    async fn undo_here(&self, claim: &FleetClaim) {
        let (machines, name, id) =
            (self.0.machines.clone(), claim.machine.machine.name.clone(), claim.claim.clone());
        let text = "it is released: the client that claimed it got no answer".to_owned();
        let release = move || {
            machines.claims.release(&name, ClaimSelector { id: Some(&id), expected: None }, text).map(drop)
        };
        // An error means that the claim has ended already.
        let _ = blocking(release).await;
    }
}

/// Whether a host has released a claim, or has said that it does not have it, or is no host of the fleet any more.
fn is_over(answer: &Result<(StatusCode, Bytes), HostClientError>) -> bool {
    match answer {
        // It takes this host for none of the fleet, or has too many requests.
        Ok((status, _)) if [401, 408, 429].contains(&status.as_u16()) => false,
        Ok((status, _)) => !status.is_server_error(),
        Err(HostClientError::Unknown { .. }) => true,
        Err(HostClientError::Unreachable { .. }) => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_is_asked_until_it_has_looked_for_the_claim() {
        let of = |status: u16| is_over(&Ok((StatusCode::from_u16(status).unwrap(), Bytes::new())));
        assert!([200, 403, 404, 409].into_iter().all(of));
        assert!(![401, 429, 500, 503].into_iter().any(of));
        let host: spillway_api::Name = "b".parse().unwrap();
        assert!(is_over(&Err(HostClientError::Unknown { host: host.clone(), nearest: None })));
        let away =
            HostClientError::Unreachable { host, address: "b:1".into(), why: "x".into(), is_sent: true };
        assert!(!is_over(&Err(away)));
    }
}

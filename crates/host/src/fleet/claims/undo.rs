//! Releases of claims whose clients could not be told of them, or of which nobody knows whether there are any. Owns how often a host is asked
//! for that.
//!
//! Invariant: a host is asked until it has answered, or is no host of the fleet any more. That is done for at most [`MOST_UNDONE`] claims at the
//! same time; for others a host is asked once.

use super::ask::{Asked, Question};
use super::{ANSWER, FleetClaims, FleetUser, UserRequest, user_request};
use crate::fleet::door::HostClientError;
use crate::machines::{ClaimSelector, UNANSWERED};
use crate::work::blocking;
use axum::body::Bytes;
use axum::http::{Request, StatusCode};
use spillway_api::{FleetClaim, HostClaimDecision, Name};
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
        self.release(user, &claim.host, &claim.machine.machine.name, &claim.claim).await;
    }

    /// Ends what a request may have claimed at a host that has not answered, if the client does not know the id of the request. Attempts up to this
    /// one make no claim any more.
    pub(super) async fn abandon(self, request: UserRequest, last: u64, host: Name) {
        let turn = self.0.undone.try_acquire().ok();
        let mut pause = FIRST_PAUSE;
        loop {
            match self.ask(&host, &request, Question::Close { attempt: last + 1 }).await {
                Asked::Decided(HostClaimDecision::Claimed(claim)) => {
                    return self
                        .release(&request.user, &host, &claim.machine.machine.name, &claim.claim)
                        .await;
                }
                Asked::Decided(_) | Asked::Wrong(_) => return,
                Asked::NotSent(_) | Asked::Lost(_) => {}
            }
            if turn.is_none() || !self.0.view.borrow().hosts.contains_key(&host) {
                return;
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }

    async fn release(&self, user: &FleetUser, host: &Name, machine: &Name, claim: &str) {
        if *host == self.0.door.host {
            return self.release_here(machine.clone(), claim.to_owned()).await;
        }
        let path = format!("/v1/machines/{machine}/claim?claim={claim}");
        let turn = self.0.undone.try_acquire().ok();
        let mut pause = FIRST_PAUSE;
        while let Some(request) = user_request(user, Request::delete(&path)) {
            let answer = self.0.door.client.whole(host, request, ANSWER).await;
            if is_over(&answer) || turn.is_none() {
                return;
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }

    async fn release_here(&self, machine: Name, claim: String) {
        let machines = self.0.machines.clone();
        let release = move || {
            let selector = ClaimSelector { id: Some(&claim), expected: None };
            machines.claims.release(&machine, selector, UNANSWERED.to_owned()).map(drop)
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
        let host: Name = "b".parse().unwrap();
        assert!(is_over(&Err(HostClientError::Unknown { host: host.clone(), nearest: None })));
        let away =
            HostClientError::Unreachable { host, address: "b:1".into(), why: "x".into(), is_sent: true };
        assert!(!is_over(&Err(away)));
    }
}

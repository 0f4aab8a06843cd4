//! Claims that the fleet of this host asks for. Owns what a claim of the fleet needs beside a machine.
//!
//! Invariant: a request of the fleet has one claim on this host at most, whichever daemon has sent it. An attempt that was closed before it
//! made a claim makes none, however late it arrives.

use super::claims::{ClaimPermit, Claimant, Claims, FleetMark, KeyedClaim, made_claim};
use super::closed_attempts::AttemptState;
use crate::error::HostError;
use crate::idempotency::{IdempotentRequest, key_digest};
use crate::store::{Changes, Revision};
use spillway_api::{ClaimFence, ErrorCode, HostClaim, HostClaimDecision, Name, NewClaim};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::SystemTime;

/// A request of a fleet for a machine.
#[derive(Clone, Debug)]
pub struct FleetRequest {
    /// Catalog of the machine.
    pub catalog: Name,
    /// The machine and the claim that are asked for.
    pub claim: NewClaim,
    /// Name of the user, without the host that it has come through.
    pub user: String,
    /// The claim that was made for the request.
    made: IdempotentRequest,
    /// Name of the record of the attempts that are closed for it.
    closed: String,
}

/// How a request is carried out this time.
#[derive(Clone, Debug)]
pub struct FleetRequestTerms {
    /// Number of the attempt of this request. Those of repeats are not below [`super::closed_attempts::FIRST_REPEAT`].
    pub attempt: u64,
    /// When the request came to the daemon that asks, by its clock.
    pub sent: SystemTime,
    /// Epoch of this host, by the records that the daemon that asks knew.
    pub epoch: i64,
    /// Whether only a machine that is ready is taken, whatever the request says.
    pub ready_only: bool,
    /// User and address of the client, for people.
    pub who: String,
}

impl FleetRequest {
    /// Creates the request with this id. Its scope is the fleet and the user, so that it is the same through any host.
    pub fn new(fleet: &Name, user: &str, id: &str, catalog: &Name, claim: &NewClaim) -> FleetRequest {
        // No name of a user has a parenthesis, so that no caller of this host has the same scope.
        let scope = format!("{user} (of fleet {fleet})");
        FleetRequest {
            catalog: catalog.clone(),
            claim: claim.clone(),
            user: user.to_owned(),
            made: IdempotentRequest::new(&scope, &format!("fleet-claims/{catalog}"), id, claim),
            closed: key_digest(&scope, &format!("fleet-attempts/{catalog}"), id),
        }
    }

    /// The key that the request may add.
    pub fn key(&self) -> &IdempotentRequest {
        &self.made
    }
}

impl Claims {
    /// Claims a machine for the fleet. `epoch` returns the epoch of this host as long as its lease is certainly valid.
    ///
    /// # Errors
    /// The request itself is wrong, or the records cannot be read. All else is a decision.
    pub fn claim_for_fleet(
        &self,
        request: &FleetRequest,
        terms: &FleetRequestTerms,
        epoch: Arc<dyn Fn() -> Option<i64> + Send + Sync>,
    ) -> Result<HostClaimDecision, HostError> {
        if let Some(made) = self.made_for_fleet(request, true)? {
            return Ok(made);
        }
        let decided: Arc<Mutex<Option<HostClaimDecision>>> = Arc::default();
        let refuse = {
            let decided = Arc::clone(&decided);
            move |decision: HostClaimDecision, message: &str| {
                *decided.lock().unwrap_or_else(PoisonError::into_inner) = Some(decision);
                Err(HostError::new(ErrorCode::Conflict, message))
            }
        };
        let (of, closed) = (request.closed.clone(), self.closed.clone());
        let FleetRequestTerms { attempt, sent, epoch: asked, .. } = *terms;
        let permit = move |changes: &mut Changes| {
            match closed.look(changes, &of, attempt, sent)? {
                AttemptState::Open => {}
                AttemptState::Closed(attempt) => {
                    return refuse(HostClaimDecision::Superseded { attempt }, "the attempt is closed");
                }
                AttemptState::Stale => return refuse(HostClaimDecision::Stale, "the attempt is too old"),
            }
            match epoch() {
                Some(epoch) if epoch == asked => Ok(FleetMark { epoch, attempt }),
                // Before it got this one, a repeat may have closed all hosts but this one.
                Some(_) => refuse(HostClaimDecision::Stale, "the epoch is an earlier one"),
                None => refuse(HostClaimDecision::Isolated, "this host has no valid lease"),
            }
        };
        let by = Claimant {
            who: terms.who.clone(),
            owner: request.user.clone(),
            request: request.made.clone(),
            permit: Some(ClaimPermit(Arc::new(permit))),
        };
        let claim = NewClaim { any: request.claim.any && !terms.ready_only, ..request.claim.clone() };
        match self.claim(&request.catalog, &claim, &by) {
            Ok((_, is_repeated)) => {
                let gone = || HostError::new(ErrorCode::Internal, "the record of the claim is gone");
                self.made_for_fleet(request, is_repeated)?.ok_or_else(gone)
            }
            Err(refused) => {
                // The same request may have come twice.
                if let Some(made) = self.made_for_fleet(request, true)? {
                    return Ok(made);
                }
                let decided = decided.lock().unwrap_or_else(PoisonError::into_inner).take();
                match (decided, refused) {
                    (Some(decision), _) => Ok(decision),
                    (None, HostError { code, message, .. }) if is_refusal(code) => {
                        Ok(HostClaimDecision::Refused { code, message })
                    }
                    (None, error) => Err(error),
                }
            }
        }
    }

    /// Returns the claim that this host has made for a request. If it has made none, attempts before this one can make none any more.
    ///
    /// # Errors
    /// The records cannot be read or written, or the id is that of another request.
    pub fn close_for_fleet(
        &self,
        request: &FleetRequest,
        attempt: u64,
    ) -> Result<HostClaimDecision, HostError> {
        if let Some(made) = self.made_for_fleet(request, true)? {
            return Ok(made);
        }
        self.closed.admit(&request.closed)?;
        let closed = self.objects.change(|changes| {
            if made_claim(&request.made, changes)?.is_some() {
                return Ok(None);
            }
            let later = self.closed.close(changes, &request.closed, attempt)?;
            let superseded = later.map(|attempt| HostClaimDecision::Superseded { attempt });
            Ok::<_, HostError>(Some(superseded.unwrap_or(HostClaimDecision::Closed)))
        })?;
        let forgotten =
            || HostError::new(ErrorCode::Conflict, "the record of the claim was removed meanwhile");
        match closed {
            Some(decision) => Ok(decision),
            None => self.made_for_fleet(request, true)?.ok_or_else(forgotten),
        }
    }

    /// Up to which number attempts of a request are closed on this host.
    ///
    /// # Errors
    /// The records cannot be read.
    pub fn closed_for_fleet(&self, request: &FleetRequest) -> Result<Option<u64>, HostError> {
        self.closed.closed(&request.closed)
    }

    /// The claim that was made for a request, or its end.
    fn made_for_fleet(
        &self,
        request: &FleetRequest,
        is_repeated: bool,
    ) -> Result<Option<HostClaimDecision>, HostError> {
        let made = self.objects.change(|changes| made_claim(&request.made, changes))?;
        let Some((KeyedClaim { machine, claim, fleet }, Revision(revision))) = made else { return Ok(None) };
        let unmarked = || HostError::new(ErrorCode::Damaged, "the record of the claim has no epoch");
        let FleetMark { epoch, attempt } = fleet.ok_or_else(unmarked)?;
        let found = match self.reader.get(&machine) {
            Err(e) if e.code != ErrorCode::NotFound => return Err(e),
            found => found.ok(),
        };
        let is_held = found.filter(|found| found.claim.as_ref().is_some_and(|held| held.id == claim));
        Ok(Some(match is_held {
            None => HostClaimDecision::Ended { machine, attempt },
            Some(machine) => {
                let fence = ClaimFence { host_epoch: epoch, revision };
                HostClaimDecision::Claimed(Box::new(HostClaim {
                    machine,
                    claim,
                    fence,
                    attempt,
                    is_repeated,
                }))
            }
        }))
    }
}

/// Whether a host that answers so has made no claim, and another one may have a machine.
fn is_refusal(code: ErrorCode) -> bool {
    matches!(code, ErrorCode::Exhausted | ErrorCode::Conflict | ErrorCode::NotFound | ErrorCode::InUse)
}

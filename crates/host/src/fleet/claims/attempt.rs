//! One attempt to claim a machine: hosts are asked one after the other. Owns what is known of the hosts that were asked.
//!
//! Invariant: the next host is asked only when the one before has made no claim for this request, and cannot make one any more.

use super::ask::{Asked, Question};
use super::{FleetClaims, LONGEST, UserRequest};
use crate::error::HostError;
use crate::fleet::etcd::now;
use spillway_api::{ErrorCode, FleetClaim, HostClaim, HostClaimDecision, LOST_AFTER_SECONDS_DEFAULT, Name};
use spillway_fleet::claim::{Candidate, candidates};
use std::collections::BTreeSet;
use std::time::{Duration, SystemTime};
use tokio::time::Instant;

/// Time until a host whose answer was lost is asked again.
pub(super) const PAUSE: Duration = Duration::from_millis(100);
/// How often a host is asked for a machine after its answers were lost.
const TRIES: u32 = 3;
/// After so many hosts that take a first request for an old one it is carried out as such.
const MOST_STALE: u32 = 3;
/// Number of reasons in a message.
const MOST_REASONS: usize = 5;

/// One request in the course of being carried out.
pub(super) struct ClaimAttempt {
    pub(super) claims: FleetClaims,
    pub(super) request: UserRequest,
    /// Its number.
    pub(super) number: u64,
    /// Hosts that have not answered, with the number under which they were asked for a machine.
    unanswered: BTreeSet<(Name, u64)>,
    /// When the request came. A host refuses what is too old, so that a daemon that stood still claims nothing that was closed long ago.
    pub(super) sent: SystemTime,
    pub(super) until: Instant,
    /// Hosts of which it is not known whether they have made a claim.
    pub(super) open: BTreeSet<Name>,
    /// Why hosts have given no machine.
    reasons: Vec<String>,
    /// Code of the last refusal.
    refused: Option<ErrorCode>,
}

/// What has become of a question to a host for a machine.
pub(super) enum Tried {
    /// It has given one.
    Claimed(Box<FleetClaim>),
    /// It gives none.
    No,
    /// It is not known whether it has given one.
    Lost,
    /// A later attempt has closed this one.
    Superseded(u64),
    /// The host may have forgotten that this one was closed.
    Stale,
}

/// How a request ends that nobody has sent before.
pub(super) enum FirstEnd {
    /// It has claimed this machine.
    Claimed(Box<FleetClaim>),
    /// It has to be carried out as one that was sent before. The attempts up to this number may have been closed.
    Again(u64),
}

impl ClaimAttempt {
    pub(super) fn new(claims: FleetClaims, request: UserRequest) -> ClaimAttempt {
        let (sent, until) = (SystemTime::now(), Instant::now() + LONGEST);
        let (unanswered, open, reasons, refused) = Default::default();
        ClaimAttempt { claims, request, number: 0, unanswered, sent, until, open, reasons, refused }
    }

    /// The same for another task.
    pub(super) fn of_host(&self) -> ClaimAttempt {
        let fresh = ClaimAttempt::new(self.claims.clone(), self.request.clone());
        let (number, unanswered) = (self.number, self.unanswered.clone());
        ClaimAttempt { number, unanswered, sent: self.sent, until: self.until, ..fresh }
    }

    /// Carries out a request that nobody has sent before. Its numbers begin with 0, so that each repeat has a larger one.
    pub(super) async fn first(&mut self) -> Result<FirstEnd, HostError> {
        let candidates = self.candidates()?;
        // After that: a repeat that these hosts came too late for has closed this one.
        if self.request.is_kept
            && let Some(number) = self.claims.closed_here(&self.request).await?
        {
            return Ok(FirstEnd::Again(number));
        }
        let mut stale = 0;
        for candidate in candidates {
            match self.claim_first(&candidate).await? {
                Tried::Claimed(claim) => return Ok(FirstEnd::Claimed(claim)),
                Tried::Superseded(number) => return Ok(FirstEnd::Again(number)),
                Tried::Stale => stale += 1,
                Tried::No | Tried::Lost => {}
            }
            // The clock of one host may be wrong; otherwise that of this one is, or all hosts have new leases.
            if stale == MOST_STALE {
                break;
            }
        }
        if stale > 0 { Ok(FirstEnd::Again(0)) } else { Err(self.no_machine()) }
    }

    /// Refuses to ask another host when the time is over. All hosts that were asked give no machine.
    pub(super) fn check_time(&self) -> Result<(), HostError> {
        if Instant::now() < self.until {
            return Ok(());
        }
        let message = format!(
            "no host has given a machine of '{}' within {} s, and not all were asked{}: the request has claimed nothing",
            self.request.catalog,
            LONGEST.as_secs(),
            self.why()
        );
        Err(HostError::new(ErrorCode::Unavailable, message))
    }

    /// Asks a host until it has given a machine, or certainly gives none.
    async fn claim_first(&mut self, candidate: &Candidate) -> Result<Tried, HostError> {
        let host = &candidate.host;
        for _ in 0..TRIES {
            self.check_time()?;
            match self.try_host(candidate).await? {
                Tried::Lost => {}
                tried => return Ok(tried),
            }
            self.number += 1;
            // What a lost host has claimed is over with it.
            let Some(closed) = self.close_or_lose(host).await? else { return Ok(Tried::No) };
            self.open.remove(host);
            match closed {
                HostClaimDecision::Claimed(claim) => {
                    return Ok(Tried::Claimed(Box::new(self.describe(host, *claim))));
                }
                HostClaimDecision::Ended { machine, .. } => return Err(self.ended(host, &machine)),
                HostClaimDecision::Superseded { attempt } => return Ok(Tried::Superseded(attempt)),
                _ => {}
            }
        }
        self.reasons.push(format!("{host}: its answers are lost again and again"));
        Ok(Tried::No)
    }

    /// Closes the attempts before this one at a host. `None`: it counts as lost, and etcd itself has no newer lease of it.
    async fn close_or_lose(&self, host: &Name) -> Result<Option<HostClaimDecision>, HostError> {
        let mut closed = self.close(host).await?;
        while closed.is_none() {
            // Before the look at the host, so that a lease of it is seen there or is newer.
            let revision = self.claims.0.view.borrow().revision;
            let back = format!("{host} does not answer, and may be back");
            let why = match self.is_lost(host) {
                false => back,
                true => match self.claims.knows_all_hosts(revision).await {
                    Ok(true) => break,
                    Ok(false) => back,
                    Err(e) => e.message,
                },
            };
            if Instant::now() + PAUSE >= self.until {
                return Err(self.unknown(&why));
            }
            tokio::time::sleep(PAUSE).await;
            if !self.is_lost(host) {
                closed = self.close(host).await?;
            }
        }
        Ok(closed)
    }

    /// Hosts that may have a machine, in the order in which they are asked.
    pub(super) fn candidates(&self) -> Result<Vec<Candidate>, HostError> {
        let view = self.claims.0.view.borrow();
        if view.revision == 0 {
            let message = "the records of the fleet were not read yet: see 'spillway fleet status'";
            return Err(HostError::new(ErrorCode::Unavailable, message));
        }
        let catalog = &self.request.catalog;
        if !view.catalogs.contains_key(catalog) {
            let names = view.catalogs.keys().map(Name::as_str);
            return Err(HostError::not_found("catalog of the fleet", catalog.as_str(), names));
        }
        let taken = self.claims.0.taken.lock(&view);
        Ok(candidates(&view, catalog, &self.request.id, self.request.claim.any, &taken, now()))
    }

    /// Asks a host once for a machine.
    pub(super) async fn try_host(&mut self, candidate: &Candidate) -> Result<Tried, HostError> {
        let Candidate { host, ready_only, epoch } = candidate;
        let (attempt, ready_only, sent, epoch) = (self.number, *ready_only, self.sent, *epoch);
        let question = Question::Claim { attempt, ready_only, sent, epoch };
        let asked = self.claims.ask(host, &self.request, question).await;
        let parts = &self.claims.0;
        let decision = match asked {
            Asked::Decided(decision) => decision,
            Asked::NotSent(why) => {
                self.reasons.push(why);
                return Ok(Tried::No);
            }
            Asked::Lost(_) => {
                self.open.insert(host.clone());
                self.unanswered.insert((host.clone(), attempt));
                return Ok(Tried::Lost);
            }
            Asked::Wrong(e) => return Err(e),
        };
        match decision {
            HostClaimDecision::Claimed(claim) => {
                if !claim.is_repeated {
                    let (view, catalog) = (parts.view.borrow(), &self.request.catalog);
                    parts.taken.lock(&view).note_claim(&view, host, catalog, now());
                }
                Ok(Tried::Claimed(Box::new(self.describe(host, *claim))))
            }
            HostClaimDecision::Ended { machine, .. } => Err(self.ended(host, &machine)),
            HostClaimDecision::Superseded { attempt } => Ok(Tried::Superseded(attempt)),
            HostClaimDecision::Stale => {
                self.reasons.push(format!("{host} has another clock than this host, or a new lease"));
                Ok(Tried::Stale)
            }
            HostClaimDecision::Isolated => {
                self.reasons.push(format!("{host} has no valid lease"));
                Ok(Tried::No)
            }
            HostClaimDecision::Refused { code, message } => {
                let (view, catalog) = (parts.view.borrow(), &self.request.catalog);
                parts.taken.lock(&view).note_refusal(&view, host, catalog, now());
                self.reasons.push(format!("{host}: {message}"));
                self.refused = Some(code);
                Ok(Tried::No)
            }
            // The answer to another question.
            HostClaimDecision::Closed => {
                self.open.insert(host.clone());
                Ok(Tried::Lost)
            }
        }
    }

    /// Closes the attempts before this one at a host. Asks until the host answers. `None`: it counts as lost by the records that this daemon
    /// has seen.
    ///
    /// # Errors
    /// The time is over, or the request is wrong.
    pub(super) async fn close(&self, host: &Name) -> Result<Option<HostClaimDecision>, HostError> {
        loop {
            let asked = self.claims.ask(host, &self.request, Question::Close { attempt: self.number }).await;
            let why = match asked {
                Asked::Decided(
                    decision @ (HostClaimDecision::Claimed(_)
                    | HostClaimDecision::Ended { .. }
                    | HostClaimDecision::Superseded { .. }
                    | HostClaimDecision::Closed),
                ) => return Ok(Some(decision)),
                Asked::Decided(_) => format!("{host} answers another question"),
                Asked::Wrong(e) => return Err(e),
                Asked::NotSent(why) | Asked::Lost(why) => why,
            };
            if self.is_lost(host) {
                return Ok(None);
            }
            if Instant::now() + PAUSE >= self.until {
                return Err(self.unknown(&why));
            }
            tokio::time::sleep(PAUSE).await;
        }
    }

    /// Whether a host that does not answer counts as lost. Only a daemon with a lease knows.
    fn is_lost(&self, host: &Name) -> bool {
        let parts = &self.claims.0;
        let view = parts.view.borrow();
        let catalog = view.catalogs.get(&self.request.catalog);
        let seconds = catalog.map(|catalog| catalog.value.spec.fleet.lost_after_seconds);
        let lost_after_ms = u64::from(seconds.unwrap_or(LOST_AFTER_SECONDS_DEFAULT)) * 1000;
        (parts.epoch)().is_some() && parts.departures.lock(&view).is_lost(&view, host, lost_after_ms, now())
    }

    pub(super) fn describe(&self, host: &Name, claim: HostClaim) -> FleetClaim {
        let HostClaim { machine, claim, fence, attempt, is_repeated } = claim;
        FleetClaim {
            host: host.clone(),
            address: machine.status.address.clone(),
            machine,
            claim,
            fence,
            request: self.request.id.clone(),
            // Otherwise this request has made it, and the answer was lost.
            is_repeated: is_repeated && !self.unanswered.contains(&(host.clone(), attempt)),
        }
    }

    /// No host gives a machine.
    pub(super) fn no_machine(&self) -> HostError {
        let catalog = &self.request.catalog;
        let mut message = format!("no machine of '{catalog}' is free on the hosts of the fleet");
        if !self.request.claim.any {
            message = format!("no machine of '{catalog}' is free and ready on the hosts of the fleet");
        }
        message += &self.why();
        // Where nobody has said that there is none, hosts do not answer.
        let code = match self.refused {
            None if !self.reasons.is_empty() => ErrorCode::Unavailable,
            _ => ErrorCode::Exhausted,
        };
        HostError::new(code, message)
    }

    /// The last reasons, for a message.
    fn why(&self) -> String {
        let last = self.reasons.iter().rev().take(MOST_REASONS).cloned().collect::<Vec<_>>();
        if last.is_empty() { String::new() } else { format!(" ({})", last.join("; ")) }
    }

    /// Nobody knows whether the request was carried out.
    pub(super) fn unknown(&self, why: &str) -> HostError {
        let id = &self.request.id;
        if !self.request.is_kept {
            let message = format!(
                "it is not known whether a machine was claimed: {why}. One that was is released: it can be claimed again"
            );
            return HostError::new(ErrorCode::Unavailable, message);
        }
        let message = format!(
            "it is not known whether the request {id} has claimed a machine: {why}. Repeat it with 'Idempotency-Key: {id}' and without \
             first=true (spillway fleet claim --key {id}), through any host"
        );
        HostError::new(ErrorCode::Unavailable, message)
    }

    /// The same error, with what the client has to know where a host may have made a claim.
    pub(super) fn with_open(&self, error: HostError) -> HostError {
        if self.open.is_empty() { error } else { self.unknown(&error.message) }
    }

    pub(super) fn ended(&self, host: &Name, machine: &Name) -> HostError {
        let message = format!(
            "the claim that this Idempotency-Key has made, of {machine} on {host}, is over: take a new key for a new claim"
        );
        HostError::new(ErrorCode::Conflict, message)
    }
}

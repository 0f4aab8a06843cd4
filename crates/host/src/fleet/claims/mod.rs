//! Claims of machines of the fleet, through any of its hosts (docs/design/062-claims-of-a-fleet.md).
//!
//! Owns the order of the questions to hosts; each host decides for itself. Invariant: a request that may have been carried out at a host is
//! sent to no other one before it is known that it was not, and cannot be any more.

mod ask;
mod attempt;
mod repeat;
mod undo;

pub use undo::MOST_UNDONE;

use super::door::{CALLER_HEADER, FleetDoor, caller_value};
use super::etcd::now;
use crate::access::caller::{Caller, Proof};
use crate::error::HostError;
use crate::idempotency::Idempotency;
use crate::machines::{FleetRequest, FleetRequestTerms, Machines, claim_ended};
use crate::work::blocking;
use attempt::{ClaimAttempt, FirstEnd};
use axum::body::Body;
use axum::http::{HeaderValue, Request, StatusCode};
use futures_util::future::BoxFuture;
use spillway_api::{ErrorCode, FleetClaim, HostClaimDecision, MachineDetails, Name, NewClaim};
use spillway_fleet::Moment;
use spillway_fleet::claim::{Departures, TakenMachines};
use spillway_fleet::transaction::Revision;
use spillway_fleet::view::FleetView;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::{Semaphore, watch};

/// Longest time until a request is answered, without the wait for a machine that starts.
pub const LONGEST: Duration = Duration::from_secs(if cfg!(test) { 4 } else { 20 });
/// Least time between two looks at which hosts have leases.
const LOOK: Duration = Duration::from_millis(500);
/// Longest time until this daemon has seen what etcd has.
const SEEN: Duration = Duration::from_secs(2);
/// A daemon that has not looked at its clock for so long has stood still.
const STILL: Duration = Duration::from_secs(10);
/// Time after that in which requests may come that were sent before.
const WAKING: Duration = Duration::from_secs(60);
/// Longest time until a host has described or released a machine.
const ANSWER: Duration = Duration::from_secs(5);

/// Returns the epoch of this host as long as its lease is certainly valid.
pub type OwnEpoch = Arc<dyn Fn() -> Option<i64> + Send + Sync>;

/// Asks etcd whether the records of this revision have all hosts, and all leases of hosts. Returns this revision if they have, and otherwise a later
/// one whose records have them.
pub type AllHosts = Arc<dyn Fn(Revision) -> BoxFuture<'static, Result<Revision, HostError>> + Send + Sync>;

/// Claims of the fleet. A clone is the same.
#[derive(Clone)]
pub struct FleetClaims(Arc<ClaimParts>);

/// What the claims of a fleet are made of. Order of locks: the view, then what is [`BehindView`].
pub struct ClaimParts {
    /// Name of the fleet.
    pub fleet: Name,
    /// Connections to other hosts.
    pub door: Arc<FleetDoor>,
    /// Machines of this host.
    pub machines: Machines,
    /// Idempotency keys of this host.
    pub idempotency: Idempotency,
    /// The records of the fleet, as they come.
    pub view: watch::Receiver<FleetView>,
    /// Epoch of this host, while it may act for the fleet.
    pub epoch: OwnEpoch,
    /// Which records have all hosts.
    pub all_hosts: AllHosts,
    /// What was taken of hosts since their last reports.
    pub taken: BehindView<TakenMachines>,
    /// Since when hosts have had no lease.
    pub departures: BehindView<Departures>,
    /// For claims that are undone at hosts that do not answer.
    pub undone: Semaphore,
    /// Whether this daemon goes on without a pause.
    pub clock: Mutex<ClaimClock>,
}

/// What is locked only by who has the view already: in the other order, a task that waits to write the view can keep two others waiting for each
/// other.
#[derive(Debug, Default)]
pub struct BehindView<T>(Mutex<T>);

impl<T> BehindView<T> {
    fn lock(&self, _view: &FleetView) -> MutexGuard<'_, T> {
        locked(&self.0)
    }
}

/// Notices that this daemon has stood still: what it reads then may have been sent long before.
#[derive(Debug)]
pub struct ClaimClock {
    looked: Moment,
    /// When it went on.
    woke: Option<Moment>,
}

impl Default for ClaimClock {
    fn default() -> ClaimClock {
        ClaimClock { looked: now(), woke: None }
    }
}

impl ClaimClock {
    fn look(&mut self) {
        let at = now();
        if at.since_ms(self.looked) > STILL.as_millis() as u64 {
            self.woke = Some(at);
        }
        self.looked = at;
    }

    fn has_stood_still(&mut self) -> bool {
        self.look();
        self.woke.is_some_and(|woke| now().since_ms(woke) < WAKING.as_millis() as u64)
    }
}

/// A user of the fleet who asks for a machine.
#[derive(Clone, Debug)]
pub struct FleetUser {
    /// Name, without the host that the user has asked.
    pub name: String,
    /// User and address, for people.
    who: String,
    /// How this user is named to other hosts; none for one who has come through another host.
    header: Option<HeaderValue>,
}

impl FleetUser {
    /// The user that has made a request.
    pub fn of(caller: &Caller) -> FleetUser {
        let name = match caller.proof {
            Proof::Member => caller.name.rsplit_once(" (at ").map_or(&*caller.name, |(name, _)| name),
            _ => &*caller.name,
        };
        FleetUser { name: name.to_owned(), who: caller.to_string(), header: caller_value(caller) }
    }
}

/// A request for a machine, and who has made it.
#[derive(Clone, Debug)]
pub struct UserRequest {
    /// Who has made it.
    pub user: FleetUser,
    /// Its id.
    pub id: String,
    /// Whether the client knows the id, and may repeat the request. What another one has claimed is released if the client is not told of it.
    pub is_kept: bool,
    /// Catalog of the machine.
    pub catalog: Name,
    /// What is asked for.
    pub claim: NewClaim,
}

impl FleetClaims {
    /// Begins to watch which hosts have leases.
    pub fn begin(parts: ClaimParts) -> FleetClaims {
        let claims = FleetClaims(Arc::new(parts));
        let (mut view, weak) = (claims.0.view.clone(), Arc::downgrade(&claims.0));
        let of_clock = weak.clone();
        tokio::spawn(async move {
            while let Some(parts) = of_clock.upgrade() {
                locked(&parts.clock).look();
                drop(parts);
                tokio::time::sleep(STILL / 10).await;
            }
        });
        tokio::spawn(async move {
            while let Some(parts) = weak.upgrade() {
                {
                    let view = view.borrow_and_update();
                    parts.departures.lock(&view).observe(&view, now());
                }
                drop(parts);
                tokio::time::sleep(LOOK).await;
                if view.changed().await.is_err() {
                    return;
                }
            }
        });
        claims
    }

    /// Claims a machine on one of the hosts. With `first`, nobody has sent a request with this id before; without it, all hosts are asked for
    /// its claim first.
    ///
    /// # Errors
    /// No host has a machine, or it is not known whether the request was carried out: `unavailable`.
    pub async fn claim(&self, request: UserRequest, first: bool) -> Result<FleetClaim, HostError> {
        if request.user.header.is_none() {
            return Err(HostError::invalid(format!(
                "{} has come through another host, and a claim of the fleet is passed on only once: ask this host directly, without --host",
                request.user.who
            )));
        }
        let mut attempt = ClaimAttempt::new(self.clone(), request);
        // Another daemon may have taken this one for lost, and have carried out the request. An id of this daemon nobody else knows.
        let may_be_late = attempt.request.is_kept && locked(&self.0.clock).has_stood_still();
        let first = first && !may_be_late;
        let claimed = carry_out(&mut attempt, first).await;
        if !attempt.request.is_kept {
            let ClaimAttempt { request, number, open, .. } = attempt;
            let has_it = claimed.as_ref().ok().map(|claim| &claim.host);
            for host in open.into_iter().filter(|host| Some(host) != has_it) {
                tokio::spawn(self.clone().abandon(request.clone(), number, host));
            }
        }
        claimed
    }

    /// Whether the records of this revision have all hosts that there are now, and all that have leases. If not, this daemon has newer ones
    /// soon.
    ///
    /// # Errors
    /// etcd does not say.
    async fn knows_all_hosts(&self, revision: Revision) -> Result<bool, HostError> {
        let needed = (self.0.all_hosts)(revision).await?;
        if needed <= revision {
            return Ok(true);
        }
        let mut view = self.0.view.clone();
        let _ = tokio::time::timeout(SEEN, view.wait_for(|view| view.revision >= needed)).await;
        Ok(false)
    }

    /// Decides about a machine of this host.
    ///
    /// # Errors
    /// The request itself is wrong, or the records of the host cannot be read.
    pub async fn decide(
        &self,
        request: &UserRequest,
        terms: FleetRequestTerms,
    ) -> Result<HostClaimDecision, HostError> {
        let (parts, of) = (Arc::clone(&self.0), self.local(request));
        run(move || {
            let decided = parts.machines.claims.claim_for_fleet(&of, &terms, Arc::clone(&parts.epoch));
            parts.idempotency.note(of.key());
            decided
        })
        .await
    }

    /// Closes earlier attempts at this host.
    ///
    /// # Errors
    /// As with [`FleetClaims::decide`].
    pub async fn close(&self, request: &UserRequest, attempt: u64) -> Result<HostClaimDecision, HostError> {
        let (parts, of) = (Arc::clone(&self.0), self.local(request));
        run(move || parts.machines.claims.close_for_fleet(&of, attempt)).await
    }

    /// Up to which number this host itself has closed attempts of a request.
    async fn closed_here(&self, request: &UserRequest) -> Result<Option<u64>, HostError> {
        let (parts, of) = (Arc::clone(&self.0), self.local(request));
        run(move || parts.machines.claims.closed_for_fleet(&of)).await
    }

    /// Makes this daemon believe that it has stood still until now.
    #[cfg(test)]
    pub(crate) fn stand_still(&self) {
        locked(&self.0.clock).woke = Some(now());
    }

    fn local(&self, request: &UserRequest) -> FleetRequest {
        let UserRequest { user, id, catalog, claim, .. } = request;
        FleetRequest::new(&self.0.fleet, &user.name, id, catalog, claim)
    }

    /// Waits until a claimed machine is ready or has failed, for this time at most. Returns the claim as it is then.
    ///
    /// # Errors
    /// `conflict`: it has ended meanwhile.
    pub async fn wait(
        &self,
        user: &FleetUser,
        claim: FleetClaim,
        at_most: Duration,
    ) -> Result<FleetClaim, HostError> {
        let name = &claim.machine.machine.name;
        let ended = || claim_ended(&format!("{}/{name}", claim.host));
        let found = if claim.host == self.0.door.host {
            match self.0.machines.reader.wait(name, at_most).await {
                Ok((_, machine)) => Some(machine),
                Err(e) if e.code == ErrorCode::NotFound => return Err(ended()),
                Err(_) => None,
            }
        } else {
            let path = format!("/v1/machines/{name}?wait={}", at_most.as_secs());
            let asked = match user_request(user, Request::get(path)) {
                Some(request) => self.0.door.client.whole(&claim.host, request, at_most + ANSWER).await.ok(),
                None => None,
            };
            match asked {
                Some((StatusCode::NOT_FOUND, _)) => return Err(ended()),
                Some((status, body)) if status.is_success() => {
                    serde_json::from_slice::<MachineDetails>(&body).ok()
                }
                _ => None,
            }
        };
        match found {
            // Without an answer the client sees that the machine is not settled, and asks again.
            None => Ok(claim),
            Some(machine) if machine.claim.as_ref().is_some_and(|held| held.id == claim.claim) => {
                Ok(FleetClaim { address: machine.status.address.clone(), machine, ..claim })
            }
            Some(_) => Err(ended()),
        }
    }
}

async fn carry_out(attempt: &mut ClaimAttempt, first: bool) -> Result<FleetClaim, HostError> {
    let seen = match first {
        false => 0,
        true => match attempt.first().await? {
            FirstEnd::Claimed(claim) => return Ok(*claim),
            FirstEnd::Again(seen) => seen,
        },
    };
    repeat::again(attempt, seen).await
}

/// Completes a request for a user to another host. None: the user has come through another host, or it is no request.
fn user_request(user: &FleetUser, request: axum::http::request::Builder) -> Option<Request<Body>> {
    request.header(CALLER_HEADER, user.header.clone()?).body(Body::empty()).ok()
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Does work on the records of this host.
async fn run<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, HostError> + Send + 'static,
) -> Result<T, HostError> {
    let broken =
        |e| HostError::new(ErrorCode::Internal, format!("a fault of the daemon ({e}): please report this"));
    blocking(work).await.map_err(broken)?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_daemon_that_stood_still_knows_that_for_a_minute() {
        let ago = |seconds: u64| Moment(now().0 - 1000 * seconds);
        let mut clock = ClaimClock::default();
        assert!(!clock.has_stood_still());
        clock.looked = ago(9);
        assert!(!clock.has_stood_still(), "it was busy");
        // Whoever asks first notices it.
        clock.looked = ago(11);
        assert!(clock.has_stood_still() && clock.has_stood_still());
        clock.woke = Some(ago(61));
        assert!(!clock.has_stood_still());
    }
}

//! Repeats of requests whose answers were lost. Owns the numbers of their attempts.
//!
//! Invariants: a repeat claims only after every host that may have the claim, and does not count as lost, has said that it has none and
//! takes no earlier attempt any more. A request that was repeated later claims nothing any more: the later one may have been told that
//! nothing is claimed.

use super::attempt::{ClaimAttempt, PAUSE, Tried};
use crate::error::HostError;
use crate::machines::closed_attempts::{FIRST_REPEAT, unix_ms};
use spillway_api::{ErrorCode, FleetClaim, HostClaimDecision, Name};
use spillway_fleet::claim::possible_holders;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, SystemTime};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout_at};

/// Hosts that are asked at the same time.
const AT_ONCE: usize = 32;
/// How often all hosts are asked.
const ROUNDS: u32 = 8;
/// After the claim was found, the other hosts have so long to say that they have a later one.
const OTHERS: Duration = Duration::from_secs(1);
/// Bits of a number that differ between attempts of the same millisecond.
const RANDOM_BITS: u32 = FIRST_REPEAT.trailing_zeros();

/// What all hosts have said.
enum Closed {
    /// One has the claim.
    Found(Box<FleetClaim>),
    /// None has it.
    Nowhere,
    /// A later attempt has come first.
    Superseded(u64),
}

/// Carries out a request that may have been carried out before. `seen`: a first request has met attempts up to this number.
pub(super) async fn again(attempt: &mut ClaimAttempt, seen: u64) -> Result<FleetClaim, HostError> {
    let mut may_claim = seen < FIRST_REPEAT && take_number(attempt, seen, SystemTime::now());
    let mut why = "it was repeated by others at the same time, or answers were lost";
    'rounds: for round in 0..ROUNDS {
        if round > 0 {
            // Two that look at the same time would meet again and again.
            let random = uuid::Uuid::new_v4().as_u128() as u32 % (100 << round.min(4));
            tokio::time::sleep(PAUSE + Duration::from_millis(random.into())).await;
        }
        if Instant::now() >= attempt.until {
            break;
        }
        if (attempt.claims.0.epoch)().is_none() {
            let message = "this host has no valid lease, so that it may not know all hosts that could have the claim: ask another one";
            return Err(attempt.with_open(HostError::new(ErrorCode::Unavailable, message)));
        }
        let (hosts, revision) = {
            let view = attempt.claims.0.view.borrow();
            (possible_holders(&view), view.revision)
        };
        match close_all(attempt, hosts).await? {
            Closed::Found(claim) => return Ok(*claim),
            Closed::Superseded(number) => {
                // Later it may be that of a request that came after this one.
                may_claim = may_claim && round == 0 && take_number(attempt, number, SystemTime::now());
                continue;
            }
            // It looks for the claim of the later request.
            Closed::Nowhere if !may_claim => continue,
            Closed::Nowhere => {}
        }
        // After the closing: who has closed more hosts since then has closed these ones later.
        let knows_all = attempt.claims.knows_all_hosts(revision).await;
        if !knows_all.map_err(|e| attempt.with_open(e))? {
            why = "this host sees the records of the fleet late, so that it may not know all hosts that could have the claim";
            continue;
        }
        // Who has got a lease since then was closed under an earlier one, or not at all.
        let (closed, newer): (Vec<_>, Vec<_>) =
            attempt.candidates()?.into_iter().partition(|candidate| candidate.epoch <= revision);
        for candidate in closed {
            attempt.check_time()?;
            match attempt.try_host(&candidate).await? {
                Tried::Claimed(claim) => return Ok(*claim),
                Tried::No => {}
                Tried::Superseded(_) => {
                    may_claim = false;
                    continue 'rounds;
                }
                // By the clock of one daemon, the next number is lower than those of later requests.
                Tried::Lost | Tried::Stale => {
                    attempt.number += 1;
                    continue 'rounds;
                }
            }
        }
        if newer.is_empty() {
            return Err(attempt.no_machine());
        }
        why = "hosts have come meanwhile";
    }
    Err(attempt.unknown(why))
}

/// Takes a number of a repeat that is larger than this one, by the time at which the request came. Returns false, and takes none, if the number is
/// that of a later request. Numbers that are ahead of this host's clock are not: the clock of their host is.
fn take_number(attempt: &mut ClaimAttempt, seen: u64, now: SystemTime) -> bool {
    let number = later_number(unix_ms(attempt.sent), seen, unix_ms(now));
    attempt.number = number.unwrap_or(attempt.number);
    number.is_some()
}

fn later_number(came: u64, seen: u64, now: u64) -> Option<u64> {
    let taken = seen >> RANDOM_BITS;
    if (came..=now).contains(&taken) {
        return None;
    }
    let random = uuid::Uuid::new_v4().as_u128() as u64 & ((1 << RANDOM_BITS) - 1);
    // 41 bits of milliseconds last until 2039, 63 bits of the whole for centuries longer; it stays a number of JSON's integers.
    let time = came.max(taken.saturating_add(1));
    Some((time << RANDOM_BITS | random) & (u64::MAX >> 1))
}

/// Closes the attempts before this one at all hosts.
async fn close_all(attempt: &ClaimAttempt, hosts: BTreeSet<Name>) -> Result<Closed, HostError> {
    let turns = Arc::new(Semaphore::new(AT_ONCE));
    let mut asked = JoinSet::new();
    for host in hosts {
        let (turns, one) = (Arc::clone(&turns), attempt.of_host());
        asked.spawn(async move {
            let _turn = turns.acquire_owned().await;
            let decided = one.close(&host).await;
            (host, decided)
        });
    }
    let mut found: Option<(u64, Name, HostClaimDecision)> = None;
    let (mut superseded, mut failed) = (None, None);
    let mut until = attempt.until + Duration::from_secs(10);
    while let Ok(Some(one)) = timeout_at(until, asked.join_next()).await {
        let fault = |e| {
            HostError::new(ErrorCode::Internal, format!("a fault of the daemon ({e}): please report this"))
        };
        let (host, decided) = one.map_err(fault)?;
        let number = match &decided {
            Ok(Some(HostClaimDecision::Claimed(claim))) => claim.attempt,
            Ok(Some(HostClaimDecision::Ended { attempt, .. })) => *attempt,
            Ok(Some(HostClaimDecision::Superseded { attempt })) => {
                superseded = superseded.max(Some(*attempt));
                continue;
            }
            Ok(_) => continue,
            Err(e) => {
                failed = failed.or(Some(e.clone()));
                continue;
            }
        };
        until = until.min(Instant::now() + OTHERS);
        if let (Ok(Some(decision)), true) =
            (decided, found.as_ref().is_none_or(|(before, ..)| *before < number))
        {
            found = Some((number, host, decision));
        }
    }
    match (found, failed, superseded) {
        (Some((_, host, HostClaimDecision::Claimed(claim))), ..) => {
            Ok(Closed::Found(Box::new(attempt.describe(&host, *claim))))
        }
        (Some((_, host, HostClaimDecision::Ended { machine, .. })), ..) => {
            Err(attempt.ended(&host, &machine))
        }
        (_, Some(e), _) => Err(e),
        (_, None, Some(number)) => Ok(Closed::Superseded(number)),
        _ if !asked.is_empty() => Err(attempt.unknown("not all hosts have answered")),
        _ => Ok(Closed::Nowhere),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_repeat_has_a_larger_number_than_all_but_later_requests() {
        let at = |ms: u64| ms << RANDOM_BITS | 5;
        let (came, now) = (1_800_000_000_000, 1_800_000_003_000);
        for (seen, time) in [
            (0, Some(came)),
            (7, Some(came)),
            (at(came - 1), Some(came)),
            (at(came), None),
            (at(now), None),
            // The clock of its host is ahead.
            (at(now + 1), Some(now + 2)),
            (at(now + 3_600_000), Some(now + 3_600_001)),
        ] {
            let number = later_number(came, seen, now);
            assert_eq!(number.map(|number| number >> RANDOM_BITS), time, "{seen}");
            assert!(number.is_none_or(|number| number > seen && number >= FIRST_REPEAT));
        }
        assert!(later_number(came, u64::MAX, now).is_some_and(|number| number <= i64::MAX as u64));
    }
}

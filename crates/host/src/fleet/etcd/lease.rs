//! The lease of this host: granted, renewed, and replaced when it has ended. Owns until when it is valid for this host.
//!
//! Invariants: a lease is valid from the sending of the request whose answer renewed it, for less than the answered time. An answer
//! is that of the last request: a stream that has missed one is given up.

use super::error::MemberFailure;
use super::link::Link;
use super::member::Member;
use super::now;
use super::request::{REQUEST_TIME, ask};
use etcd_client::{LeaseKeepAliveStream, LeaseKeeper, ResponseHeader};
use spillway_fleet::Moment;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;

/// Time of a lease, in seconds. etcd grants a longer one where its elections take long.
pub const LEASE_SECONDS: i64 = 15;
/// The longest time of a lease that is taken, in seconds.
const LONGEST_SECONDS: i64 = 120;
/// How much earlier than at etcd a lease ends here, in milliseconds: for clocks that differ in pace, and for who acts on it.
const MARGIN_MS: u64 = 3_000;
/// Time until a failed request is repeated.
const PAUSE: Duration = Duration::from_millis(250);
/// The same, after one that other members would refuse too.
const LONG_PAUSE: Duration = Duration::from_secs(3);

/// The lease of this host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeaseState {
    /// Its identity in etcd.
    pub id: i64,
    /// Until when this host may act as one that has it.
    pub valid_until: Moment,
    /// Sending of the last request to renew it that was answered.
    pub renewed: Moment,
}

impl LeaseState {
    /// Whether this host may act as one that has it, at a moment.
    pub fn is_valid(&self, at: Moment) -> bool {
        at < self.valid_until
    }
}

/// What has become of a request to renew.
enum Renewal {
    /// It goes on for so many seconds from the sending.
    Renewed(i64, Moment),
    /// etcd does not have it any more, or it is none of ours.
    Ended,
}

/// A stream of renewals of one lease with one member.
struct RenewalStream {
    member: Arc<Member>,
    keeper: LeaseKeeper,
    answers: LeaseKeepAliveStream,
}

/// Keeps a lease for as long as the store is open.
pub async fn keep_lease(link: Arc<Link>, state: watch::Sender<Option<LeaseState>>) {
    let mut keeper = Keeper { link, id: None, stream: None, seconds: LEASE_SECONDS, state };
    loop {
        let pause = keeper.step().await;
        tokio::time::sleep(pause).await;
    }
}

struct Keeper {
    link: Arc<Link>,
    /// The lease, if there is one.
    id: Option<i64>,
    stream: Option<RenewalStream>,
    /// Time of the lease as etcd has it.
    seconds: i64,
    state: watch::Sender<Option<LeaseState>>,
}

impl Keeper {
    /// Grants or renews. Returns the time until the next step.
    async fn step(&mut self) -> Duration {
        let member = match self.link.member().await {
            Ok(member) => member,
            Err(error) => return if error.is_permanent() { LONG_PAUSE } else { PAUSE },
        };
        let done = match self.id {
            None => self.grant(&member).await.map(|()| true),
            Some(id) => match self.renew(&member, id).await {
                Ok(Renewal::Renewed(seconds, sent)) => {
                    self.set_valid(id, seconds, sent);
                    Ok(true)
                }
                Ok(Renewal::Ended) => {
                    (self.id, self.stream) = (None, None);
                    self.state.send_if_modified(|state| state.take().is_some());
                    Ok(false)
                }
                Err(failure) => Err(failure),
            },
        };
        match done {
            // etcd may grant more than was asked for, but nobody counts on that.
            Ok(true) => Duration::from_secs(self.seconds.min(LEASE_SECONDS).unsigned_abs()) / 3,
            Ok(false) => Duration::ZERO,
            Err(failure) => {
                self.stream = None;
                self.link.leave(&member, &failure);
                if failure.is_of_the_member() { PAUSE } else { LONG_PAUSE }
            }
        }
    }

    async fn grant(&mut self, member: &Member) -> Result<(), MemberFailure> {
        let sent = now();
        let granted = ask(REQUEST_TIME, member.leases().grant(LEASE_SECONDS, None)).await?;
        if !is_ours(granted.ttl()) || granted.id() == 0 {
            let why = format!("a lease of {} s was granted, and not one of {LEASE_SECONDS} s", granted.ttl());
            // The code of an internal error.
            return Err(MemberFailure::Answer(13, why));
        }
        self.check_term(granted.header())?;
        self.id = Some(granted.id());
        self.set_valid(granted.id(), granted.ttl(), sent);
        Ok(())
    }

    async fn renew(&mut self, member: &Arc<Member>, id: i64) -> Result<Renewal, MemberFailure> {
        if self.stream.as_ref().is_some_and(|stream| !Arc::ptr_eq(&stream.member, member)) {
            self.stream = None;
        }
        let stream = match &mut self.stream {
            Some(stream) => stream,
            // Opening renews it, too. The client does not tell for how long: the next answer does.
            None => match ask(REQUEST_TIME, open(member, id)).await? {
                Some(stream) => self.stream.insert(stream),
                None => return Ok(Renewal::Ended),
            },
        };
        let sent = now();
        let answer = ask(REQUEST_TIME, async {
            stream.keeper.keep_alive().await?;
            stream.answers.message().await
        });
        let Some(answer) = answer.await? else {
            return Err(MemberFailure::Unreachable("it has ended the stream of renewals".into()));
        };
        let seconds = answer.ttl();
        self.check_term(answer.header())?;
        Ok(if answer.id() == id && is_ours(seconds) {
            Renewal::Renewed(seconds, sent)
        } else {
            Renewal::Ended
        })
    }

    /// Errors if the member has stood still: then it may renew a lease that others have ended.
    fn check_term(&self, header: Option<&ResponseHeader>) -> Result<(), MemberFailure> {
        let earlier = header
            .and_then(|header| self.link.health.is_earlier_term(header.cluster_id(), header.raft_term()));
        earlier.map_or(Ok(()), Err)
    }

    fn set_valid(&mut self, id: i64, seconds: i64, sent: Moment) {
        self.seconds = seconds;
        let valid_until = valid_until(sent, seconds);
        self.state.send_replace(Some(LeaseState { id, valid_until, renewed: sent }));
    }
}

fn valid_until(sent: Moment, seconds: i64) -> Moment {
    sent.after_ms(seconds.unsigned_abs().saturating_mul(1000).saturating_sub(MARGIN_MS))
}

/// Whether a lease of this time is one that a daemon has asked for.
fn is_ours(seconds: i64) -> bool {
    (LEASE_SECONDS..=LONGEST_SECONDS).contains(&seconds)
}

/// Opens a stream of renewals. None: etcd does not have the lease.
async fn open(member: &Arc<Member>, id: i64) -> Result<Option<RenewalStream>, etcd_client::Error> {
    match member.leases().keep_alive(id).await {
        Ok((keeper, answers)) => Ok(Some(RenewalStream { member: Arc::clone(member), keeper, answers })),
        // Its only words for an answer of 0 seconds.
        Err(etcd_client::Error::LeaseKeepAliveError(why)) if why == "lease not found" => Ok(None),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lease_is_valid_for_less_than_its_time() {
        assert_eq!(valid_until(Moment(100), 15), Moment(12_100));
        assert_eq!(valid_until(Moment(100), 2), Moment(100));
        let state = LeaseState { id: 1, valid_until: Moment(12_100), renewed: Moment(100) };
        assert!(state.is_valid(Moment(12_099)) && !state.is_valid(Moment(12_100)));
        assert!(is_ours(15) && is_ours(30) && !is_ours(14) && !is_ours(i64::MAX) && !is_ours(-1));
    }
}

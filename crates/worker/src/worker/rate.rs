//! The rate limit of a disk: how many requests, and how many bytes of reads and writes, may begin in a second; and how much may
//! begin in a turn. Owns what is owed, and whose turn it is; what waits stays where it is, in the guest's ring or the client's
//! socket.
//!
//! Invariant: in any stretch of time no more begins than its length allows, the burst, and one request over.

use super::reactor::Reactor;
use spillway_control::Rate;
use spillway_core::{BLOCK_BYTES, Operation, Request, SECTOR_BYTES, add};

/// Units of what is owed.
const PS_PER_SECOND: u128 = 1_000_000_000_000;
const PS_PER_NS: u64 = 1_000;
/// A burst of which nothing is said: what a tenth of a second allows.
const USUAL_BURSTS: u64 = 10;
/// Blocks of all requests that may begin in a turn, and one request over: the live curve visits each of them, which takes 9 ns.
const TURN_BLOCKS: u64 = 64 << 10;
/// No burst is shorter than 2 ms of its rate: a sleep may be late by some of that, which would be lost for good.
const LEAST_BURST_PS: u64 = 2_000_000_000;

/// A disk's limits.
pub struct Limiter {
    requests: Option<Bucket>,
    bytes: Option<Bucket>,
}

/// What begins is owed, and is paid off by the time that passes. While less than the burst is owed, more may begin.
struct Bucket {
    per_second: u64,
    burst_ps: u64,
    owed_ps: u64,
    at_ns: u64,
}

impl Bucket {
    fn new(per_second: u64, burst: u64) -> Option<Bucket> {
        if per_second == 0 {
            return None;
        }
        let mut bucket = Bucket { per_second, burst_ps: 0, owed_ps: 0, at_ns: 0 };
        let burst = if burst == 0 { per_second / USUAL_BURSTS } else { burst };
        bucket.burst_ps = bucket.cost_ps(burst.max(1)).max(LEAST_BURST_PS);
        Some(bucket)
    }

    fn cost_ps(&self, units: u64) -> u64 {
        let cost = u128::from(units) * PS_PER_SECOND / u128::from(self.per_second);
        u64::try_from(cost).unwrap_or(u64::MAX)
    }

    /// How long nothing may begin.
    fn wait_ns(&mut self, now_ns: u64) -> u64 {
        let paid = now_ns.saturating_sub(self.at_ns).saturating_mul(PS_PER_NS);
        self.owed_ps = self.owed_ps.saturating_sub(paid);
        self.at_ns = self.at_ns.max(now_ns);
        match self.owed_ps.checked_sub(self.burst_ps) {
            Some(over) => over / PS_PER_NS + 1,
            None => 0,
        }
    }

    fn begin(&mut self, units: u64) {
        self.owed_ps = self.owed_ps.saturating_add(self.cost_ps(units));
    }
}

impl Limiter {
    /// `None`: as much as it can.
    pub fn new(rate: Rate) -> Option<Limiter> {
        let requests = Bucket::new(rate.iops, rate.iops_burst);
        let bytes = Bucket::new(rate.bandwidth_bytes, rate.bandwidth_burst_bytes);
        (requests.is_some() || bytes.is_some()).then_some(Limiter { requests, bytes })
    }

    /// How long no request may begin; 0: one may now.
    pub fn wait_ns(&mut self, now_ns: u64) -> u64 {
        let of = |bucket: &mut Option<Bucket>| bucket.as_mut().map_or(0, |bucket| bucket.wait_ns(now_ns));
        of(&mut self.requests).max(of(&mut self.bytes))
    }

    /// A request begins. Each counts as one; of the bytes, those that are read or written.
    pub fn begin(&mut self, request: &Request) {
        if let Some(requests) = &mut self.requests {
            requests.begin(1);
        }
        let moves = matches!(request.operation, Operation::Read | Operation::Write { .. });
        if let (Some(bytes), true) = (&mut self.bytes, moves) {
            bytes.begin(u64::from(request.sectors) * SECTOR_BYTES);
        }
    }
}

/// Who may begin requests: each in turn.
pub(super) struct Throttle {
    /// Of a disk that has one.
    limiter: Option<Limiter>,
    /// Blocks of requests that may still begin in this turn.
    blocks_left: u64,
    /// Who comes first.
    queue: u16,
    nbd: u16,
    nbd_first: bool,
    /// Since when the limit lets nothing begin.
    since_ns: Option<u64>,
}

impl Throttle {
    /// For a limit, if there is one.
    pub fn new(rate: Rate) -> Throttle {
        Throttle {
            limiter: Limiter::new(rate),
            blocks_left: TURN_BLOCKS,
            queue: 0,
            nbd: 0,
            nbd_first: false,
            since_ns: None,
        }
    }

    /// Another limit holds from here on.
    pub fn set(&mut self, rate: Rate) {
        self.limiter = Limiter::new(rate);
    }

    /// To be called before the first request of a turn.
    pub fn begin_turn(&mut self) {
        self.blocks_left = TURN_BLOCKS;
    }

    /// Whether one more request may begin in this turn.
    #[inline]
    pub fn lets_begin(&mut self, now_ns: u64) -> bool {
        self.blocks_left > 0 && self.wait_ns(now_ns) == 0
    }

    /// How long no request may begin.
    #[inline]
    pub fn wait_ns(&mut self, now_ns: u64) -> u64 {
        self.limiter.as_mut().map_or(0, |limiter| limiter.wait_ns(now_ns))
    }

    /// Whether NBD clients come before the VMM.
    pub fn is_nbd_first(&self) -> bool {
        self.nbd_first
    }

    /// The queue that comes first, and the NBD client.
    pub fn first(&self) -> (u16, u16) {
        (self.queue, self.nbd)
    }

    /// A request of this queue begins.
    #[inline]
    pub fn begins_of_queue(&mut self, request: &Request, queue: u16) {
        (self.queue, self.nbd_first) = (queue + 1, true);
        self.begins(request);
    }

    /// A request of this NBD client begins.
    pub fn begins_of_nbd(&mut self, request: &Request, n: u16) {
        (self.nbd, self.nbd_first) = (n + 1, false);
        self.begins(request);
    }

    #[inline]
    fn begins(&mut self, request: &Request) {
        let blocks = u64::from(request.sectors) * SECTOR_BYTES / BLOCK_BYTES as u64 + 1;
        self.blocks_left = self.blocks_left.saturating_sub(blocks);
        if let Some(limiter) = &mut self.limiter {
            limiter.begin(request);
        }
    }
}

/// All below `count`, from one of them on.
pub(super) fn from(first: u16, count: u16) -> impl Iterator<Item = u16> {
    let first = if first < count { first } else { 0 };
    (first..count).chain(0..first)
}

impl Reactor {
    /// Whether somebody has requests that have not begun.
    fn is_asked(&self) -> bool {
        let clients = &self.io.clients;
        clients.nbd.iter().flatten().any(|c| c.active)
            || clients.vmms.iter().filter(|v| v.ended.is_none()).any(|vmm| {
                let f = &vmm.frontend;
                (0..f.queue_count()).any(|queue| f.is_live(queue) && f.has_work(queue))
            })
    }

    /// Whether requests may begin. Time in which none might, and in the end there was one that would have, is counted.
    pub(super) fn may_begin(&mut self) -> bool {
        let now = self.io.now_ns();
        if self.throttle.wait_ns(now) > 0 {
            self.throttle.since_ns.get_or_insert(now);
            return false;
        }
        if let Some(since) = self.throttle.since_ns.take()
            && self.is_asked()
        {
            let c = self.disk.counters();
            add(&c.throttled, 1);
            add(&c.throttled_ns, now.saturating_sub(since));
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use spillway_core::Token;

    const SECOND_NS: u64 = 1_000_000_000;

    fn read(bytes: u32) -> Request {
        Request { token: Token(0), operation: Operation::Read, sector: 0, sectors: bytes / 512 }
    }

    /// Of requests of this size that always wait, how many begin in so long, looked at each microsecond.
    fn begun(rate: Rate, bytes: u32, from_ns: u64, ns: u64) -> u64 {
        let mut limiter = Limiter::new(rate).unwrap();
        let mut begun = 0;
        let mut now = from_ns;
        while now < from_ns + ns {
            while limiter.wait_ns(now) == 0 {
                limiter.begin(&read(bytes));
                begun += 1;
            }
            now += limiter.wait_ns(now).max(1_000);
        }
        begun
    }

    #[test]
    fn as_many_begin_as_may() {
        for from_ns in [0, 77, 400 * 24 * 3600 * SECOND_NS] {
            for (iops, burst, expected) in [(500, 1, 5_001), (500, 3_500, 8_500), (1_000_000, 1, 10_002_000)]
            {
                let rate = Rate { iops, iops_burst: burst, ..Rate::default() };
                let found = begun(rate, 4096, from_ns, 10 * SECOND_NS);
                assert!(found.abs_diff(expected) <= 1 + expected / 1000, "{iops} {burst}: {found}");
            }
        }
        // However small its burst, something begins.
        for rate in [u64::MAX, 2 << 40] {
            let rate = Rate { bandwidth_bytes: rate, bandwidth_burst_bytes: 1, iops: rate, iops_burst: 1 };
            assert!(Limiter::new(rate).unwrap().wait_ns(1) == 0);
        }
        // The usual burst is a tenth of a second's.
        assert_eq!(begun(Rate { iops: 500, ..Rate::default() }, 4096, 0, 1), 50);
        let rate = Rate { bandwidth_bytes: 35_000_000, bandwidth_burst_bytes: 1, ..Rate::default() };
        let found = begun(rate, 64 << 10, 0, 10 * SECOND_NS) * (64 << 10);
        assert!(found.abs_diff(350_000_000) <= 2 * (64 << 10), "{found}");
    }

    #[test]
    fn the_tighter_one_holds_and_a_flush_moves_no_bytes() {
        let rate = Rate { iops: 100, iops_burst: 1, bandwidth_bytes: 4096 * 50, bandwidth_burst_bytes: 4096 };
        assert!(begun(rate, 4096, 0, SECOND_NS).abs_diff(51) <= 1);
        assert!(begun(rate, 512, 0, SECOND_NS).abs_diff(101) <= 1);
        let mut limiter = Limiter::new(Rate { bandwidth_bytes: 1, ..Rate::default() }).unwrap();
        for _ in 0..10 {
            limiter.begin(&Request { operation: Operation::Flush, ..read(0) });
            assert_eq!(limiter.wait_ns(0), 0);
        }
        limiter.begin(&read(512));
        assert!(limiter.wait_ns(0) > 500 * SECOND_NS);
        assert!(Limiter::new(Rate::default()).is_none());
    }

    #[test]
    fn a_turn_has_its_bound_and_the_next_one_begins_with_the_next_queue() {
        let mut throttle = Throttle::new(Rate::default());
        let long = read(1 << 30);
        for turn in 0..3 {
            throttle.begin_turn();
            let begun = from(throttle.first().0, 3).find(|&queue| {
                throttle.begins_of_queue(&long, queue);
                !throttle.lets_begin(0)
            });
            assert_eq!(begun, Some(turn), "one of 1 GiB is all of a turn");
        }
        throttle.begin_turn();
        let short = (0..).take_while(|_| {
            throttle.begins_of_nbd(&read(4096), 0);
            throttle.lets_begin(0)
        });
        assert_eq!(
            short.count() as u64,
            TURN_BLOCKS / 2 - 1,
            "each may touch one block more than it is long"
        );
        assert_eq!((throttle.first(), throttle.is_nbd_first()), ((3, 1), false));
    }
}

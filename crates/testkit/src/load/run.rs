//! Runs a load on a disk and measures it.
//!
//! Owns what a request writes, what is checked of a reply, and the clock around both. Invariant: a request counts once, when it has
//! completed, with the time from before it was built until its completion was taken.

use super::{Draw, End, Load, Measured, Rng};
use crate::driver::{Ask, Driver};
use crate::mixed::Mixed;
use crate::oracle::Oracle;
use anyhow::{Context, Result, ensure};
use hdrhistogram::Histogram;
use std::time::{Duration, Instant};

/// What stands behind a load: cheap data to measure with, or an oracle that checks every byte.
trait Content {
    /// Whether the request may start now, with these in flight.
    fn admits(&self, ask: Ask, in_flight: &[Option<Ask>]) -> bool;
    /// Before it starts: fills the buffer of a write.
    fn before(&mut self, ask: Ask, buffer: &mut [u8]);
    /// After it has succeeded.
    fn after(&mut self, ask: Ask, buffer: &[u8]) -> Result<()>;
}

/// Buffers that were filled with random bytes once. A write puts where it goes and its number into each
/// 4 KiB, so that no two are the same and none is zero.
struct NumberedContent {
    sequence: u64,
}

impl Content for NumberedContent {
    #[inline]
    fn admits(&self, _: Ask, _: &[Option<Ask>]) -> bool {
        true
    }

    #[inline]
    fn before(&mut self, ask: Ask, buffer: &mut [u8]) {
        if let Ask::Write { offset, len } = ask {
            self.sequence += 1;
            // One header per 4 KiB block is enough to make it unlike every other.
            for at in (0..len).step_by(4096) {
                buffer[at..at + 8].copy_from_slice(&(offset + at as u64).to_le_bytes());
                buffer[at + 8..at + 16].copy_from_slice(&self.sequence.to_le_bytes());
            }
        }
    }

    #[inline]
    fn after(&mut self, _: Ask, _: &[u8]) -> Result<()> {
        Ok(())
    }
}

impl Content for &mut Oracle {
    fn admits(&self, ask: Ask, in_flight: &[Option<Ask>]) -> bool {
        !in_flight.iter().flatten().any(|other| overlap(ask, *other))
    }

    fn before(&mut self, ask: Ask, buffer: &mut [u8]) {
        if let Ask::Write { offset, len } = ask {
            self.write(offset, &mut buffer[..len]);
        }
    }

    fn after(&mut self, ask: Ask, buffer: &[u8]) -> Result<()> {
        match ask {
            Ask::Read { offset, len } => self.check(offset, &buffer[..len]),
            Ask::Discard { offset, len } => {
                self.discarded(offset, len);
                Ok(())
            }
            Ask::WriteZeroes { offset, len, .. } => {
                self.zeroed(offset, len);
                Ok(())
            }
            Ask::Write { .. } | Ask::Flush => Ok(()),
        }
    }
}

pub(super) fn range(ask: Ask) -> (u64, u64) {
    match ask {
        Ask::Read { offset, len } | Ask::Write { offset, len } => (offset, offset + len as u64),
        Ask::Discard { offset, len } | Ask::WriteZeroes { offset, len, .. } => (offset, offset + len),
        Ask::Flush => (0, 0),
    }
}

fn overlap(a: Ask, b: Ask) -> bool {
    let ((a_from, a_to), (b_from, b_to)) = (range(a), range(b));
    a_from < b_to && b_from < a_to
}

/// What a load does while nothing has completed.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Wait {
    /// Looks for completions without a pause.
    Poll,
    /// The same, with naps: what is checked is not measured, and others need the processor, the disk's worker first.
    PollAndNap,
    /// Sleeps until the disk tells it.
    Sleep,
}

/// How often a loop that waits looks at the clock for the deadline.
const SPINS_PER_LOOK: u32 = 4096;
/// How often one that naps does so, some microseconds apart, and how long.
const SPINS_PER_NAP: u32 = 256;
const NAP: Duration = Duration::from_micros(50);

impl Driver {
    /// Runs a load and measures it, polling while it waits. What it reads is not looked at.
    pub fn run(&mut self, load: &Load) -> Result<Measured> {
        self.run_unchecked(load, Wait::Poll)
    }

    /// The same by a client that sleeps while it waits: the disk must tell it of completions, as it must a guest.
    pub fn run_asleep(&mut self, load: &Load) -> Result<Measured> {
        self.run_unchecked(load, Wait::Sleep)
    }

    fn run_unchecked(&mut self, load: &Load, wait: Wait) -> Result<Measured> {
        let mut rng = Rng::new(load.seed ^ 0xc0);
        let buffers: Vec<_> = (0..load.depth.min(self.depth())).map_while(|_| self.take()).collect();
        for &buffer in &buffers {
            for word in self.content(buffer).chunks_exact_mut(8) {
                word.copy_from_slice(&(rng.next_u64() | 1).to_le_bytes());
            }
        }
        buffers.into_iter().rev().for_each(|b| self.give(b));
        load.check(self)?;
        let mut draw = Draw::new(*load);
        self.run_with(load.depth, load.end, wait, || draw.draw(), NumberedContent { sequence: 0 })
    }

    /// Runs a load and checks every byte that it reads against an oracle. Requests in flight never overlap.
    pub fn run_checked(&mut self, load: &Load, oracle: &mut Oracle) -> Result<Measured> {
        load.check(self)?;
        let mut draw = Draw::new(*load);
        self.run_with(load.depth, load.end, Wait::PollAndNap, || draw.draw(), oracle)
    }

    /// Runs a mixed load and checks every byte that it reads. Requests in flight never overlap.
    pub fn run_mixed(&mut self, mixed: &Mixed, oracle: &mut Oracle) -> Result<Measured> {
        mixed.check(self)?;
        let mut rng = Rng::new(mixed.seed);
        self.run_with(mixed.depth, mixed.end, Wait::PollAndNap, || mixed.draw(&mut rng), oracle)
    }

    fn run_with(
        &mut self,
        depth: usize,
        end: End,
        wait: Wait,
        mut draw: impl FnMut() -> Ask,
        mut content: impl Content,
    ) -> Result<Measured> {
        ensure!(self.in_flight() == 0, "requests are in flight already");
        let mut under_way = UnderWay::new(self.depth())?;
        let (most, duration) = match end {
            End::After(duration) => (u64::MAX, duration),
            End::Count(count) => (count, Duration::MAX),
        };
        self.polling(wait != Wait::Sleep);
        let begin = Instant::now();
        let mut now = begin;
        let mut open = true;
        while open || self.in_flight() > 0 {
            if open {
                self.submit_more(&mut under_way, (depth, most), now, &mut draw, &mut content)?;
                open = under_way.submitted < most;
            }
            self.wait_for_completion(wait, now)?;
            now = Instant::now();
            let in_time = now - begin < duration;
            self.take_completions(&mut under_way, now, in_time, &mut content)?;
            open = open && in_time;
        }
        self.polling(false);
        let seconds = match end {
            End::After(duration) => duration.as_secs_f64(),
            End::Count(_) => begin.elapsed().as_secs_f64(),
        };
        Ok(under_way.measured(seconds))
    }

    /// Submits requests until so many are in flight, or so many have been submitted in all.
    #[inline]
    fn submit_more(
        &mut self,
        under_way: &mut UnderWay,
        (depth, most): (usize, u64),
        now: Instant,
        draw: &mut impl FnMut() -> Ask,
        content: &mut impl Content,
    ) -> Result<()> {
        let before = under_way.submitted;
        while self.in_flight() < depth && under_way.submitted < most {
            let ask = under_way.parked.take().unwrap_or_else(&mut *draw);
            if !content.admits(ask, &under_way.asked) {
                under_way.parked = Some(ask);
                break;
            }
            let Some(buffer) = self.take() else { break };
            content.before(ask, self.content(buffer));
            under_way.started[buffer] = now;
            under_way.asked[buffer] = Some(ask);
            self.submit(ask, buffer)?;
            under_way.submitted += 1;
        }
        if under_way.submitted > before { self.kick() } else { Ok(()) }
    }

    /// Waits until a completion can be taken, if anything is in flight; an error when none came within the deadline after `since`.
    #[inline]
    fn wait_for_completion(&mut self, wait: Wait, since: Instant) -> Result<()> {
        if self.in_flight() == 0 {
            return Ok(());
        }
        if wait == Wait::Sleep {
            return self.sleep();
        }
        let mut spins = 0u32;
        while !self.ready() {
            std::hint::spin_loop();
            spins += 1;
            if spins.is_multiple_of(SPINS_PER_LOOK) && since.elapsed() > self.deadline() {
                return self.hung();
            }
            if wait == Wait::PollAndNap && spins.is_multiple_of(SPINS_PER_NAP) {
                std::thread::sleep(NAP);
            }
        }
        Ok(())
    }

    /// Takes all completions that are there. Those that came in time are measured.
    #[inline]
    fn take_completions(
        &mut self,
        under_way: &mut UnderWay,
        now: Instant,
        in_time: bool,
        content: &mut impl Content,
    ) -> Result<()> {
        while let Some((buffer, ret)) = self.completed() {
            let ask = under_way.asked[buffer].take().context("a request that was not made has completed")?;
            self.outcome(ask, ret)?;
            content.after(ask, self.content(buffer))?;
            if in_time {
                under_way.count(ask, now - under_way.started[buffer]);
            }
            self.give(buffer);
        }
        Ok(())
    }
}

/// The requests of a load, and what has been measured of them.
struct UnderWay {
    /// When the request of each buffer was submitted.
    started: Vec<Instant>,
    /// The request of each buffer that is in flight.
    asked: Vec<Option<Ask>>,
    /// Drawn, but not admitted yet.
    parked: Option<Ask>,
    /// Requests that were submitted.
    submitted: u64,
    /// Requests that were completed in time.
    requests: u64,
    /// Reads among them.
    reads: u64,
    /// Their latency in nanoseconds.
    latency: Histogram<u64>,
}

impl UnderWay {
    fn new(buffers: usize) -> Result<UnderWay> {
        Ok(UnderWay {
            started: vec![Instant::now(); buffers],
            asked: vec![None; buffers],
            parked: None,
            submitted: 0,
            requests: 0,
            reads: 0,
            latency: Histogram::new_with_bounds(1, 3_600_000_000_000, 3)?,
        })
    }

    #[inline]
    fn count(&mut self, ask: Ask, took: Duration) {
        self.requests += 1;
        self.reads += u64::from(matches!(ask, Ask::Read { .. }));
        self.latency.saturating_record(took.as_nanos() as u64);
    }

    fn measured(&self, seconds: f64) -> Measured {
        let UnderWay { requests, reads, ref latency, .. } = *self;
        Measured {
            requests,
            reads,
            seconds,
            iops: requests as f64 / seconds,
            mean_ns: latency.mean(),
            p50_ns: latency.value_at_quantile(0.5),
            p99_ns: latency.value_at_quantile(0.99),
            max_ns: latency.max(),
        }
    }
}

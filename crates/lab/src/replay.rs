//! A trace, asked of a disk again: at its own pace, faster or slower, or as fast as the disk answers.
//!
//! Owns the clock and the order; what the trace holds is its own business. Invariants: requests begin in the trace's order, on one
//! queue, so that a disk sees what the recorded one saw; none waits for another's end, but when as many are under way as there may be;
//! one that is late because the disk was busy is counted as late.

use anyhow::{Context, Result, bail, ensure};
use hdrhistogram::Histogram;
use serde::Serialize;
use spillway_advisor::{Event, Operation};
use spillway_testkit::driver::{Ask, Driver};
use std::time::{Duration, Instant};

/// How soon a request is before a sleep is not worth it.
const SPIN: Duration = Duration::from_micros(100);

/// How fast.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Speed {
    /// So many times as fast as it was recorded.
    Times(f64),
    /// As fast as the disk answers.
    Full,
}

/// When a trace, or a part of it, is asked.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    /// How fast.
    pub speed: Speed,
    /// When what the trace has at `from_us` is due.
    pub start: Instant,
    /// A time of the trace.
    pub from_us: u64,
    /// How long before a request is due a processor is kept busy with waiting: that long it does not sleep. Not for many at a time.
    pub spin: Duration,
    /// When it is too late for another request.
    pub until: Option<Instant>,
}

impl Pace {
    /// A whole trace, from now on.
    pub fn now(speed: Speed) -> Pace {
        Pace { speed, start: Instant::now(), from_us: 0, spin: SPIN, until: None }
    }

    /// When something in the trace is due; none at full speed.
    pub fn due(&self, time_us: u64) -> Option<Instant> {
        let Speed::Times(times) = self.speed else { return None };
        let after = Duration::try_from_secs_f64(time_us.saturating_sub(self.from_us) as f64 / 1e6 / times);
        self.start.checked_add(after.ok()?)
    }
}

/// What a replay came to.
#[derive(Clone, Debug, Serialize)]
pub struct Replayed {
    /// Requests that were made.
    pub requests: u64,
    /// Of them, those that failed.
    pub failed: u64,
    /// What the trace has that a disk cannot be asked over its socket: resets.
    pub left_out: u64,
    /// How long it took.
    pub seconds: f64,
    /// How long the trace is, at this speed; none at full speed.
    pub trace_seconds: Option<f64>,
    /// Requests that began more than a millisecond late, since as many were under way as there may be.
    pub late: u64,
    /// Reads, from begin to end.
    pub read: Latency,
    /// Writes.
    pub write: Latency,
}

/// A distribution.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Latency {
    /// How many.
    pub count: u64,
    /// The time that half of them did not exceed.
    pub p50_ns: u64,
    /// The same for 99 of 100.
    pub p99_ns: u64,
    /// The slowest.
    pub max_ns: u64,
}

impl Latency {
    fn of(found: &Histogram<u64>) -> Latency {
        Latency {
            count: found.len(),
            p50_ns: found.value_at_quantile(0.5),
            p99_ns: found.value_at_quantile(0.99),
            max_ns: found.max(),
        }
    }
}

/// Requests under way, and what is known of those that have ended.
struct Under<'a, F: FnMut(u64, Instant)> {
    driver: &'a mut Driver,
    started: Vec<Option<(Operation, u64, Instant)>>,
    ended: F,
    read: Histogram<u64>,
    write: Histogram<u64>,
    failed: u64,
}

impl<F: FnMut(u64, Instant)> Under<'_, F> {
    /// Takes what has ended.
    fn reap(&mut self) -> Result<()> {
        while let Some((buffer, result)) = self.driver.completed() {
            let (operation, time_us, began) =
                self.started[buffer].take().context("a request that was not made has completed")?;
            self.driver.give(buffer);
            let now = Instant::now();
            (self.ended)(time_us, now);
            let ns = u64::try_from((now - began).as_nanos()).unwrap_or(u64::MAX).max(1);
            match operation {
                Operation::Read => self.read.saturating_record(ns),
                Operation::Write => self.write.saturating_record(ns),
                _ => {}
            }
            self.failed += u64::from(result != 0);
        }
        Ok(())
    }

    fn wait(&mut self) -> Result<()> {
        self.driver.sleep()?;
        self.reap()
    }

    fn start(&mut self, event: &Event, ask: Ask, number: u64) -> Result<()> {
        let buffer = loop {
            match self.driver.take() {
                Some(buffer) => break buffer,
                None => self.wait()?,
            }
        };
        if let Ask::Write { len, .. } = ask {
            // No block of it is like another, and none is all zeroes.
            for block in self.driver.content(buffer)[..len].chunks_mut(512) {
                block[..8].copy_from_slice(&(number | 1 << 63).to_le_bytes());
            }
        }
        self.started[buffer] = Some((event.operation, event.time_us, Instant::now()));
        if let Err(e) = self.driver.submit(ask, buffer) {
            self.driver.give(buffer);
            return Err(e);
        }
        self.driver.kick()
    }
}

/// Asks it all. The driver has one queue; its depth is the most that is under way.
pub fn replay<E: Into<anyhow::Error>>(
    driver: &mut Driver,
    events: impl Iterator<Item = Result<Event, E>>,
    speed: Speed,
    progress: impl FnMut(u64, Duration),
) -> Result<Replayed> {
    replay_at(driver, events, &Pace::now(speed), progress, |_, _| ())
}

/// The same at a time that is said, for a part of a trace. `ended` is told of each request's end: its time in the trace, and now.
pub fn replay_at<E: Into<anyhow::Error>>(
    driver: &mut Driver,
    events: impl Iterator<Item = Result<Event, E>>,
    pace: &Pace,
    mut progress: impl FnMut(u64, Duration),
    ended: impl FnMut(u64, Instant),
) -> Result<Replayed> {
    ensure!(driver.in_flight() == 0, "requests are in flight already");
    if let Speed::Times(times) = pace.speed {
        ensure!(times.is_finite() && times > 0.0, "a speed is more than 0, not {times}");
    }
    let histogram = || Histogram::new_with_bounds(1, 3_600_000_000_000, 3);
    let (capacity, most) = (driver.capacity_bytes(), driver.request_bytes() as u64);
    driver.polling(false);
    let started = vec![None; driver.depth()];
    let mut under = Under { driver, started, ended, read: histogram()?, write: histogram()?, failed: 0 };
    let begin = Instant::now();
    let (mut requests, mut left_out, mut late, mut last_us) = (0, 0, 0, pace.from_us);
    for event in events {
        let event = event.map_err(Into::into)?;
        last_us = event.time_us;
        if let Some(due) = pace.due(event.time_us) {
            loop {
                under.reap()?;
                let left = due.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    break;
                }
                if left > pace.spin {
                    under.driver.sleep_until(due - pace.spin)?;
                } else {
                    std::hint::spin_loop();
                }
            }
            late += u64::from(due.elapsed() > Duration::from_millis(1));
        }
        if let Some(until) = pace.until {
            ensure!(Instant::now() < until, "the trace's requests take too long: {requests} were made");
        }
        let Some(asks) = asks(&event, capacity, most)? else {
            left_out += 1;
            continue;
        };
        for ask in asks {
            under.start(&event, ask, requests)?;
            requests += 1;
        }
        under.reap()?;
        if requests % 1024 == 0 {
            progress(requests, begin.elapsed());
        }
    }
    while under.driver.in_flight() > 0 {
        under.wait()?;
    }
    Ok(Replayed {
        requests,
        failed: under.failed,
        left_out,
        seconds: begin.elapsed().as_secs_f64(),
        trace_seconds: pace.due(last_us).map(|due| (due - pace.start).as_secs_f64()),
        late,
        read: Latency::of(&under.read),
        write: Latency::of(&under.write),
    })
}

/// What a disk is to be asked for an event: in whole sectors, and in pieces that fit a buffer. None: it cannot be.
fn asks(event: &Event, capacity: u64, most: u64) -> Result<Option<Vec<Ask>>> {
    if event.operation == Operation::Reset {
        return Ok(None);
    }
    if event.operation == Operation::Flush {
        return Ok(Some(vec![Ask::Flush]));
    }
    let (start, end) =
        (event.offset_bytes / 512 * 512, (event.offset_bytes + event.len_bytes).div_ceil(512) * 512);
    if end > capacity {
        bail!(
            "a request of {} bytes at {} is beyond the disk, which has {capacity} bytes: it must be as large as the one that was recorded",
            event.len_bytes,
            event.offset_bytes
        );
    }
    // A discard moves no bytes; the largest that a request can name.
    let most = match event.operation {
        Operation::Read | Operation::Write => most,
        _ => 1 << 30,
    };
    let pieces = (start..end).step_by(most as usize).map(|offset| {
        let len = most.min(end - offset);
        match event.operation {
            Operation::Read => Ask::Read { offset, len: len as usize },
            Operation::Write => Ask::Write { offset, len: len as usize },
            Operation::Discard => Ask::Discard { offset, len },
            _ => Ask::WriteZeroes { offset, len, unmap: true },
        }
    });
    Ok(Some(pieces.collect()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_is_asked_in_pieces_that_fit() {
        let event =
            |operation, offset_bytes, len_bytes| Event { time_us: 0, operation, offset_bytes, len_bytes };
        let pieces = |e: Event| asks(&e, 1 << 30, 4096).map(|asks| asks.map(|asks| asks.len()));
        assert_eq!(pieces(event(Operation::Write, 512, 8192)).unwrap(), Some(2));
        assert_eq!(pieces(event(Operation::Write, 100, 1)).unwrap(), Some(1));
        assert_eq!(pieces(event(Operation::Discard, 0, 1 << 30)).unwrap(), Some(1));
        assert_eq!(pieces(event(Operation::Flush, 0, 0)).unwrap(), Some(1));
        assert_eq!(pieces(event(Operation::Reset, 0, 0)).unwrap(), None);
        assert!(pieces(event(Operation::Read, 1 << 30, 512)).is_err());
    }
}

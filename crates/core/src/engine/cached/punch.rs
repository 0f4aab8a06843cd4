//! Punches empty segments out of the file.
//!
//! Owns the time of it; the log chooses the segments. Invariant: no segment that will be needed soon is punched.

use crate::engine::cached::log::Log;
use crate::engine::cached::tiers::Tiers;
use crate::error::Errno;
use crate::health::RETRY_NS;
use crate::io::Io;
use crate::ops::Op;
use crate::shared::Shared;
use spillway_layout::add;

/// The most punches in flight.
const PUNCHES: u32 = 2;
/// Time without a newly filled segment before empty segments are punched.
const QUIET_NS: u64 = 500_000_000;

#[derive(Default)]
pub(super) struct Punching {
    /// Until when empty segments stay in the file because more are filled, or a punch failed.
    after_ns: u64,
    /// The file system cannot punch.
    pub impossible: bool,
    in_flight: u32,
}

impl Punching {
    pub fn is_busy(&self) -> bool {
        self.in_flight > 0
    }

    /// When it must be called again even if nothing happens.
    pub fn deadline_ns(&self) -> u64 {
        self.after_ns
    }

    /// Punches empty segments beyond a few once no more are being filled. When the log has no live block it punches all of
    /// them at once, and when the file is over a lower limit as many as are over it. A file system may make a punch wait for
    /// I/O in flight, or I/O for a punch.
    #[inline]
    pub fn step<I: Io>(&mut self, tiers: &mut Tiers, shared: &mut Shared, io: &mut I) {
        if tiers.log.empties() == 0 {
            self.after_ns = 0;
        } else {
            self.step_with_some(tiers, shared, io);
        }
    }

    fn step_with_some<I: Io>(&mut self, tiers: &mut Tiers, shared: &mut Shared, io: &mut I) {
        let all = tiers.log.live() == 0 && tiers.log.arriving == 0;
        let over = tiers.log.must_punch();
        if tiers.stands_still(shared) || self.impossible || !(over || tiers.log.has_to_punch(all)) {
            self.after_ns = 0;
            return;
        }
        if !all && !over && (self.after_ns == 0 || tiers.parts.in_use() > 0) {
            self.after_ns = shared.now_ns() + QUIET_NS;
        }
        let more = |log: &Log| if over { log.must_punch() } else { log.has_to_punch(all) };
        while self.in_flight < PUNCHES && shared.now_ns() >= self.after_ns && more(&tiers.log) {
            let segment = tiers.log.next_to_punch(shared.map.meta());
            self.in_flight += 1;
            let op = shared.ops.begin(Op::Punch { segment });
            let offset = tiers.log.first_location(segment).offset_bytes();
            io.punch_overflow(op, offset, shared.spec.segment_bytes());
        }
    }

    /// Handles the end of a punch.
    pub fn done(&mut self, tiers: &mut Tiers, shared: &Shared, segment: u32, result: Result<(), Errno>) {
        self.in_flight -= 1;
        tiers.log.punched(segment, result.is_ok(), shared.map.meta());
        match result {
            Ok(()) => add(&shared.counters().segments_punched, 1),
            // The segment's blocks are reused even if punching failed.
            Err(Errno::NOT_SUPPORTED) => self.impossible = true,
            Err(_) => self.after_ns = shared.now_ns() + RETRY_NS,
        }
    }
}

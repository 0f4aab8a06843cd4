//! FLUSH of mode `persistent`, and the mark of a reset: what brings the durable map up to date.
//!
//! Owns the order: data, fdatasync, changed pages of the durable map, fdatasync, replies. Invariants: a page of the durable
//! map is written as it was before an fdatasync began that has succeeded, so that it never names content in the file that is not
//! on the medium. Once a FLUSH has succeeded, the live map on the medium is at least as new as the durable one:
//! a page of it that may have been lost in a write that failed is stored again before the next fdatasync. Why:
//! `docs/design/031-persistent.md`.

use crate::engine::in_place::InPlace;
use crate::engine::in_place::persist::{Mark, Persistent};
use crate::engine::part::Stream;
use crate::error::Errno;
use crate::io::{Io, PartId};
use crate::ops::Op;
use crate::shared::Shared;
use crate::table::Id;
use spillway_layout::{BLOCK_BYTES, RESET_MARK, add};
use std::ops::Range;

impl InPlace {
    /// To be called when a write to the medium has failed: see [`Persistent::store_live_again`]. The kernel reports a lost page
    /// only once, so an fdatasync that is in flight may succeed without that page.
    pub(super) fn stable_write_failed(&mut self, errno: Errno) {
        if let Some(p) = &mut self.persistent {
            p.store_live_again();
            if let Some(round) = &mut p.round {
                round.errno.get_or_insert(errno);
            }
        }
    }

    /// Ends an fdatasync for these requests. The kernel reports an error once, and what it could not write is lost then. So it is kept
    /// until a FLUSH has told a client. A request with FUA promises its own bytes alone: it has the result of this fdatasync. A guest
    /// that writes through sends no FLUSH, and would fail for ever.
    pub(super) fn end_sync(&mut self, shared: &mut Shared, ids: &[Id], result: Result<(), Errno>) {
        if let Err(errno) = result {
            shared.map.meta().record_unreported(errno);
        }
        let unreported = shared.map.meta().unreported().map_or(Ok(()), Err);
        if ids.iter().any(|&id| shared.admission.is_heard_flush(id)) {
            shared.map.meta().clear_unreported();
        }
        for &id in ids {
            let is_flush = shared.admission.table().get(id).is_flush();
            shared.admission.operation_done(id, if is_flush { unreported } else { result });
        }
    }

    /// One of the request's operations: it ends when all that has completed so far is on the medium.
    pub(super) fn join_flush<I: Io>(&mut self, shared: &mut Shared, io: &mut I, id: Id) {
        self.persistent().waiters.push(id);
        self.begin_round(shared, io);
    }

    /// In mode `persistent`: whether the map on the medium may differ from the live map for these blocks.
    pub(super) fn may_be_unstable(&self, blocks: Range<u32>) -> bool {
        self.persistent.as_ref().is_some_and(|p| !p.is_stable(blocks))
    }

    fn persistent(&mut self) -> &mut Persistent {
        self.persistent.as_mut().expect("mode persistent has it")
    }

    fn begin_round<I: Io>(&mut self, shared: &mut Shared, io: &mut I) {
        let unmark = shared.map.meta().is_marked();
        let p = self.persistent();
        if p.round.is_some() || p.waiters.is_empty() {
            return;
        }
        p.start_round(unmark, false);
        self.go_on_round(shared, io);
    }

    /// Brings everything to the medium before the process ends. No request may be unfinished or arrive meanwhile. `None`: it is
    /// in progress; call again after each [`crate::Disk::end_turn`].
    pub fn make_durable<I: Io>(&mut self, shared: &mut Shared, io: &mut I) -> Option<Result<(), Errno>> {
        let unmark = shared.map.meta().is_marked();
        let (draining, is_backing_off) =
            (shared.drain.is_needed(), shared.drain.is_backing_off(shared.now_ns()));
        let Some(p) = &mut self.persistent else { return Some(Ok(())) };
        if draining {
            // An earlier page of the map may still land. A barrier may fail for ever.
            return is_backing_off.then_some(Err(Errno::IO));
        }
        if p.round.is_some() {
            return None;
        }
        let make_durable = p.make_durable.take();
        if make_durable.is_none() {
            p.start_round(unmark, true);
            self.go_on_round(shared, io);
        }
        make_durable
    }

    /// The next step of the round: copies pages, as they are now, to a staging buffer and starts an fdatasync of the content that
    /// they name; after the last pages an fdatasync of the pages themselves.
    fn go_on_round<I: Io>(&mut self, shared: &mut Shared, io: &mut I) {
        let most = shared.spec.shape.part_blocks as usize;
        let p = self.persistent.as_mut().expect("mode persistent has it");
        let round = p.round.as_mut().expect("it goes on");
        let next = &round.pages[round.done..];
        if !next.is_empty() {
            let part = self.parts.take(Stream::Collect).expect("writes leave one, and nobody else takes it");
            let n = next.len().min(most);
            for (&page, to) in next[..n].iter().zip(io.part(part).chunks_exact_mut(BLOCK_BYTES)) {
                p.live.copy_page(page, to);
            }
            round.staged = Some((part, n));
        }
        let op = shared.ops.begin(Op::RoundSync);
        io.sync_overflow(op);
    }

    /// Handles the end of the round's fdatasync.
    pub(super) fn round_synced<I: Io>(&mut self, shared: &mut Shared, io: &mut I, result: Result<(), Errno>) {
        let round = self.persistent().round();
        let (staged, unmark) = (round.staged, round.unmark);
        let result = round.errno.map_or(result, Err);
        match (result, staged) {
            (Err(errno), _) => self.fail_round(shared, io, errno),
            (Ok(()), Some((part, n))) => self.write_pages(shared, io, part, n),
            (Ok(()), None) if unmark => self.write_mark(shared, io, false),
            (Ok(()), None) => self.end_round(shared, io, Ok(())),
        }
    }

    /// Writes the staged pages to their places in the durable map, whose page 0 is for the mark.
    fn write_pages<I: Io>(&mut self, shared: &mut Shared, io: &mut I, part: PartId, n: usize) {
        let round = self.persistent().round();
        let pages = round.pages[round.done..round.done + n].to_vec();
        let runs: Vec<_> = pages.chunk_by(|a, b| a + 1 == *b).collect();
        round.writes = runs.len() as u32;
        let mut staged = 0;
        for run in runs {
            let n = run.len() as u32;
            count_pages(shared, n);
            let op = shared.ops.begin(Op::RoundWrite);
            io.write_map(op, part, staged * BLOCK_BYTES, run[0] + 1, n, false);
            staged += run.len();
        }
    }

    /// Handles the end of one of the round's writes.
    pub(super) fn round_written<I: Io>(
        &mut self,
        shared: &mut Shared,
        io: &mut I,
        result: Result<(), Errno>,
    ) {
        if let Err(errno) = result {
            shared.write_failed(io, errno);
        }
        let round = self.persistent().round();
        round.writes -= 1;
        round.errno = round.errno.or(result.err());
        if round.writes > 0 {
            return;
        }
        if let Some(errno) = round.errno {
            self.fail_round(shared, io, errno);
            return;
        }
        if let Some((part, n)) = round.staged.take() {
            round.done += n;
            self.parts.release(part);
        }
        self.go_on_round(shared, io);
    }

    /// Ends a round that failed. Its pages may be on the medium or not: all of them are to be written again.
    fn fail_round<I: Io>(&mut self, shared: &mut Shared, io: &mut I, errno: Errno) {
        self.stable_write_failed(errno);
        let p = self.persistent();
        let round = p.round.as_mut().expect("it fails once");
        round.pages.iter().for_each(|&page| p.changed.insert(page));
        if let Some((part, _)) = round.staged.take() {
            self.parts.release(part);
        }
        self.end_round(shared, io, Err(errno));
    }

    fn end_round<I: Io>(&mut self, shared: &mut Shared, io: &mut I, result: Result<(), Errno>) {
        let p = self.persistent();
        let Some(round) = p.round.take() else { return };
        if round.last {
            if let Err(errno) = result {
                shared.map.meta().record_unreported(errno);
            }
            // After an upgrade the next worker tells it too.
            let unreported = shared.map.meta().unreported();
            self.persistent().make_durable = Some(unreported.map_or(Ok(()), Err));
        } else {
            self.end_sync(shared, &round.waiters, result);
        }
        self.begin_round(shared, io);
    }

    /// Sets the mark of a reset on the medium, or takes it off.
    pub(super) fn write_mark<I: Io>(&mut self, shared: &mut Shared, io: &mut I, set: bool) {
        if set {
            shared.map.meta().set_marked(true);
            self.persistent().mark = Mark::UnderWay;
        }
        let part = self.parts.take(Stream::Collect).expect("writes leave one, and nobody else takes it");
        let page = &mut io.part(part)[..BLOCK_BYTES];
        page.fill(0);
        if set {
            page[..RESET_MARK.len()].copy_from_slice(&RESET_MARK);
        }
        count_pages(shared, 1);
        let op = shared.ops.begin(Op::Mark { part, set });
        io.write_map(op, part, 0, 0, 1, true);
    }

    /// Handles the end of the write of the mark.
    pub(super) fn mark_written<I: Io>(
        &mut self,
        shared: &mut Shared,
        io: &mut I,
        part: PartId,
        set: bool,
        result: Result<(), Errno>,
    ) {
        self.parts.release(part);
        match (set, result) {
            (_, Ok(())) => shared.write_succeeded(io),
            (_, Err(errno)) => shared.write_failed(io, errno),
        }
        match (set, result) {
            // A mark whose write failed is written again.
            (true, _) => {
                if let Err(errno) = result {
                    shared.map.meta().record_unreported(errno);
                    self.stable_write_failed(errno);
                }
                self.persistent().mark = if result.is_ok() { Mark::Written } else { Mark::Unwritten };
            }
            (false, Ok(())) => {
                shared.map.meta().set_marked(false);
                self.end_round(shared, io, Ok(()));
            }
            (false, Err(errno)) => self.fail_round(shared, io, errno),
        }
    }

    /// Begins a round after a reset, without a FLUSH: while the mark is on the medium, the next start clears both maps, and so loses
    /// what was written after the reset. If the round fails, the next FLUSH begins another.
    #[inline(never)] // Every turn of every mode would carry it.
    pub fn flush_reset<I: Io>(&mut self, shared: &mut Shared, io: &mut I) {
        let is_waiting = shared.resetting || shared.drain.is_needed() || shared.overflow_is_backing_off();
        if let Some(p) = &mut self.persistent
            && p.is_reset_unflushed
            && !is_waiting
            && p.round.is_none()
        {
            p.start_round(shared.map.meta().is_marked(), false);
            self.go_on_round(shared, io);
        }
    }

    /// Clears the live map after the reset. The next round brings that to the medium, where the mark of the reset is.
    pub(super) fn forget_states(&mut self) {
        let Some(p) = &mut self.persistent else { return };
        p.live.clear();
        (0..p.live.pages()).for_each(|page| p.changed.insert(page));
        p.mark = Mark::Unwritten;
        p.is_reset_unflushed = true;
    }
}

fn count_pages(shared: &Shared, pages: u32) {
    shared.counters().overflow.write(u64::from(pages) * BLOCK_BYTES as u64);
    add(&shared.counters().summaries, u64::from(pages));
}

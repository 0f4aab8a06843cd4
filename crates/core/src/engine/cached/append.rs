//! Guest writes of mode `overflow`: appended to the log as they come.
//!
//! Invariant: a block is committed after its write is done, and the request completes after that.

use crate::admission::MAX_PENDING;
use crate::copy::is_zero;
use crate::engine::cached::Cached;
use crate::engine::cached::tiers::Append;
use crate::engine::part::Stream;
use crate::engine::part::{PartState, Source, Staged};
use crate::entry::{Entry, Place};
use crate::error::Errno;
use crate::io::{Io, PartId};
use crate::ops::{Merge, MergeTo};
use crate::shared::{Piece, Shared};
use crate::table::{Active, Id, Wait};
use spillway_layout::{BLOCK_BYTES, add};

const BLOCK: u32 = BLOCK_BYTES as u32;

impl Cached {
    /// Collects blocks in a part, which is written when it is full or the turn ends.
    pub(super) fn write_to_log<I: Io>(&mut self, shared: &mut Shared, io: &mut I, a: &mut Active) {
        while a.at < a.len() {
            if a.pending >= MAX_PENDING || !shared.admission.takes_block(a) {
                return;
            }
            let piece = shared.piece(a);
            let old = shared.map.place(piece.block);
            if !self.tiers.log_has_space_for(shared, a, old) {
                return;
            }
            if !piece.whole && old != Place::Zero {
                let at = Some(a.at);
                if !self.merge_to_page(shared, io, a, piece, old, at) {
                    return;
                }
            } else if let Err(errno) = match self.log_page(shared, io) {
                Ok(page) => self.fill_page(shared, io, a, piece, page),
                Err(wait) => {
                    a.wait = wait;
                    return;
                }
            } {
                a.errno = Some(errno);
                return;
            } else {
                a.moved_bytes += u64::from(piece.len);
            }
            a.at += piece.len;
        }
        a.walked = true;
    }

    /// A page of the part that is being filled, or of an empty one. An error names what the request waits for.
    fn log_page<I: Io>(&mut self, shared: &mut Shared, io: &mut I) -> Result<(PartId, usize), Wait> {
        if let Some(part) = self.tiers.parts.filling(Stream::Write) {
            let used = self.tiers.parts.get(part).staged.len();
            if used < self.tiers.log.ready(Stream::Write, shared.map.meta()) as usize {
                return Ok((part, used));
            }
            self.append_or_keep(shared, io, part);
        }
        let tiers = &mut self.tiers;
        if !tiers.unflushed.is_empty()
            || shared.overflow_is_backing_off()
            || tiers.log.ready(Stream::Write, shared.map.meta()) == 0
        {
            return Err(Wait::Space);
        }
        tiers.parts.take(Stream::Write).map(|part| (part, 0)).ok_or(Wait::Part)
    }

    /// Copies the request's next piece, of a block whose old content is not needed, to a page. A piece of zeroes takes none.
    fn fill_page<I: Io>(
        &mut self,
        shared: &mut Shared,
        io: &mut I,
        a: &mut Active,
        piece: Piece,
        (part, page): (PartId, usize),
    ) -> Result<(), Errno> {
        let at = page * BLOCK_BYTES;
        if piece.len < BLOCK {
            io.part(part)[at..at + BLOCK_BYTES].fill(0);
        }
        io.guest_to_part(a.request.token, a.at, part, at + piece.from as usize, piece.len as usize)?;
        if is_zero(&io.part(part)[at..at + BLOCK_BYTES]) {
            self.tiers.commit(&mut shared.map, piece.block, Entry::ZERO);
            shared.counters().zero.write(u64::from(piece.len));
        } else {
            let id = shared.admission.begin_operation(a);
            self.tiers.stage_write(&shared.map, io, id, piece.block, part, page);
            add(&shared.counters().overflow_guest_bytes, u64::from(piece.len));
        }
        Ok(())
    }

    /// Starts the merge of a block that is written (or, without `at`, zeroed) in part, into a part of its own. That part
    /// takes no other blocks, so that none of them waits for its read. False: the request waits for a part, or for its own
    /// operations.
    pub(super) fn merge_to_page<I: Io>(
        &mut self,
        shared: &mut Shared,
        io: &mut I,
        a: &mut Active,
        piece: Piece,
        old: Place,
        at: Option<u32>,
    ) -> bool {
        if shared.has_begun_enough(a) {
            // It waits for its own operations.
            return false;
        }
        let Some(part) = self.tiers.parts.take(Stream::Write) else {
            a.wait = Wait::Part;
            return false;
        };
        self.tiers.parts.get(part).state = PartState::Writing;
        self.begin_merge(shared, io, a, piece, old, at, MergeTo::Page(part, 0));
        true
    }

    /// Handles the end of a merge: the block is complete in its page, or the merge failed.
    pub(super) fn page_merged<I: Io>(
        &mut self,
        shared: &mut Shared,
        io: &mut I,
        merge: Merge,
        (part, page): (PartId, usize),
        merged: Result<(), Errno>,
    ) {
        let Merge { id, block, .. } = merge;
        if merged.is_err() {
            self.tiers.parts.release(part);
            shared.admission.operation_done(id, merged);
            return;
        }
        shared.admission.moved(id, merge.guest_bytes());
        add(&shared.counters().overflow_guest_bytes, u64::from(merge.guest_bytes()));
        if is_zero(&io.part(part)[page * BLOCK_BYTES..][..BLOCK_BYTES]) {
            self.tiers.parts.release(part);
            self.tiers.commit(&mut shared.map, block, Entry::ZERO);
            shared.admission.operation_done(id, Ok(()));
        } else {
            self.tiers.stage_write(&shared.map, io, id, block, part, page);
            self.tiers.unflushed.push_back(part);
            self.flush_parts(shared, io);
            self.drop_unflushed(shared, io, |a| a.canceled);
        }
    }

    /// Writes the part that is being filled, and those that wait for a segment, oldest first.
    #[inline]
    pub(crate) fn flush_parts<I: Io>(&mut self, shared: &mut Shared, io: &mut I) {
        if !self.tiers.has_ram {
            self.append_all(shared, io);
        }
    }

    fn append_all<I: Io>(&mut self, shared: &mut Shared, io: &mut I) {
        if let Some(part) = self.tiers.parts.filling(Stream::Write) {
            self.append_or_keep(shared, io, part);
        }
        while let Some(&part) = self.tiers.unflushed.front() {
            if shared.overflow_is_backing_off() || self.tiers.log.ready(Stream::Write, shared.map.meta()) == 0
            {
                return;
            }
            self.tiers.unflushed.pop_front();
            self.append_or_keep(shared, io, part);
        }
    }

    /// Appends a part with blocks of requests. Without a segment it waits for one, before all others.
    fn append_or_keep<I: Io>(&mut self, shared: &mut Shared, io: &mut I, part: PartId) {
        if self.tiers.append(shared, io, part) == Append::NoSegment {
            self.tiers.parts.get(part).state = PartState::Writing;
            self.tiers.unflushed.push_front(part);
        }
    }

    /// Drops blocks of requests for which there is no segment.
    pub(crate) fn drop_unflushed<I: Io>(
        &mut self,
        shared: &mut Shared,
        io: &mut I,
        why: impl Fn(&Active) -> Option<Errno>,
    ) {
        let tiers = &mut self.tiers;
        for _ in 0..tiers.unflushed.len() {
            let part = tiers.unflushed.pop_front().expect("counted");
            let (mut staying, mut leaving): (Vec<Staged>, _) = (Vec::new(), Vec::new());
            for (page, staged) in std::mem::take(&mut tiers.parts.get(part).staged).into_iter().enumerate() {
                let leaves = match staged.source {
                    Source::Write(id) => why(shared.admission.table().get(id)).map(|errno| (id, errno)),
                    Source::Evict(_) | Source::Collect(_) => None,
                };
                match leaves {
                    Some((id, errno)) => leaving.push((staged, id, errno)),
                    None => {
                        let from = page * BLOCK_BYTES;
                        io.part(part).copy_within(from..from + BLOCK_BYTES, staying.len() * BLOCK_BYTES);
                        staying.push(staged);
                    }
                }
            }
            if staying.is_empty() {
                tiers.parts.release(part);
            } else {
                tiers.parts.get(part).staged = staying;
                tiers.unflushed.push_back(part);
            }
            for (staged, id, errno) in leaving {
                if !matches!(shared.map.place(staged.block), Place::Overflow(..)) {
                    tiers.log.arriving -= 1;
                }
                shared.admission.operation_done(id, Err(errno));
            }
        }
    }

    /// Requests whose blocks wait for a segment.
    #[inline]
    pub(crate) fn without_segment(&self) -> Vec<Id> {
        let mut writers = Vec::new();
        if self.tiers.unflushed.is_empty() {
            return writers;
        }
        for (_, part) in self.tiers.parts.iter().filter(|(id, _)| self.tiers.unflushed.contains(id)) {
            for staged in &part.staged {
                if let Source::Write(id) = staged.source
                    && !writers.contains(&id)
                {
                    writers.push(id);
                }
            }
        }
        writers
    }
}

//! Mode `persistent`: where each block is, so that it is known after everything else has died. The *live* map is shared
//! memory that outlives the processes; the *durable* map is what the medium has of it, and FLUSH brings it up to date.
//!
//! Owns the order: data, fdatasync, changed pages of the durable map, fdatasync, replies. Invariants: a page of the durable
//! map is written as it was before an fdatasync began that has ended well, so that it never says that content is in the file
//! which is not on the medium. Once a FLUSH has ended well, the live map on the medium is at least as new as the durable one:
//! a page of it that may have been lost in a write that failed is stored again before the next fdatasync. Why:
//! `docs/design/031-persistent.md`.

use crate::counters::add;
use crate::engine::in_place::InPlace;
use crate::engine::in_place::states::{BlockState, STATE_PAGE_BLOCKS, StateMap};
use crate::engine::part::Stream;
use crate::entry::{Entry, Place};
use crate::error::{DiskError, Errno};
use crate::io::{Io, PartId};
use crate::map::BlockMap;
use crate::meta::RegionState;
use crate::ops::Op;
use crate::shared::Shared;
use crate::table::Id;
use crate::units::{BLOCK_BYTES, Block, Location, REGION_BLOCKS};
use std::ops::Range;

/// What the page before the durable map begins with while a reset is not yet in that map: all of it counts as
/// [`BlockState::Base`].
pub const RESET_MARK: [u8; 16] = *b"SPILLWAY: RESET\n";

/// A set of pages of the map.
pub(crate) struct Pages(Vec<u64>);

impl Pages {
    fn none(pages: u32) -> Pages {
        Pages(vec![0; pages.div_ceil(64) as usize])
    }

    fn insert(&mut self, page: u32) {
        self.0[page as usize / 64] |= 1 << (page % 64);
    }

    fn contains(&self, page: u32) -> bool {
        self.0[page as usize / 64] >> (page % 64) & 1 != 0
    }

    /// All of them, in order; there are none afterwards.
    fn take(&mut self) -> Vec<u32> {
        let mut all = Vec::new();
        for (i, bits) in (0..).zip(&mut self.0) {
            while *bits != 0 {
                all.push(i * 64 + bits.trailing_zeros());
                *bits &= *bits - 1;
            }
        }
        all
    }
}

/// The live map, and what the medium does not have of it yet.
pub(crate) struct Persistent {
    live: StateMap,
    /// Pages of which the medium may have an earlier state.
    changed: Pages,
    /// Requests that the next round of FLUSH is for.
    waiters: Vec<Id>,
    round: Option<Round>,
    /// How the round ended that brought everything to the medium at the end.
    put_away: Option<Result<(), Errno>>,
    /// A reset has begun to write its mark, or the mark is on the medium.
    pub(crate) mark: Mark,
}

/// How far the mark of a reset is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mark {
    Unwritten,
    UnderWay,
    Written,
}

/// One FLUSH for all that asked before it began.
struct Round {
    waiters: Vec<Id>,
    /// The pages that had changed when it began; those before `done` are written.
    pages: Vec<u32>,
    /// The same as a set.
    members: Pages,
    done: usize,
    /// The staging buffer with the next pages as they were when the fdatasync began, and how many these are.
    staged: Option<(PartId, usize)>,
    /// Writes under way.
    writes: u32,
    errno: Option<Errno>,
    /// The mark of a reset is to be taken off the medium at the end.
    unmark: bool,
    /// Nobody else asks: the disk is being put away.
    last: bool,
}

impl Persistent {
    fn new(live: StateMap) -> Persistent {
        let pages = live.pages();
        let mut changed = Pages::none(pages);
        // What an earlier process had brought to the medium is not known, of either map: to write a page again is harmless.
        let used = |&page: &u32| !live.is_clear(page) || !live.is_shared_clear(page);
        for page in (0..pages).filter(used) {
            changed.insert(page);
            live.store_page(page);
        }
        Persistent { live, changed, waiters: Vec::new(), round: None, put_away: None, mark: Mark::Unwritten }
    }

    /// These blocks are there from here on.
    #[cfg_attr(feature = "crash-points", track_caller)]
    pub(crate) fn set(&mut self, blocks: Range<u32>, state: BlockState) {
        let mut at = blocks.start;
        while at < blocks.end {
            let page = at / STATE_PAGE_BLOCKS;
            let end = blocks.end.min((page + 1) * STATE_PAGE_BLOCKS);
            if self.live.set(at..end, state) {
                self.changed.insert(page);
            }
            at = end;
        }
    }

    /// Whether the medium says of these blocks what the live map does.
    fn is_stable(&self, blocks: Range<u32>) -> bool {
        let mut pages = blocks.start / STATE_PAGE_BLOCKS..blocks.end.div_ceil(STATE_PAGE_BLOCKS);
        !pages.any(|page| self.changed.contains(page) || self.round_has(page))
    }

    /// The kernel may have failed to write pages of the live map to the file, and has said so: it takes such a page for
    /// written, evicts it, and reads an earlier one. So what changed since the last FLUSH is stored again.
    fn store_live_again(&self) {
        let changed = |&page: &u32| self.changed.contains(page) || self.round_has(page);
        (0..self.live.pages()).filter(changed).for_each(|page| self.live.store_page(page));
    }

    fn round_has(&self, page: u32) -> bool {
        self.round.as_ref().is_some_and(|round| round.members.contains(page))
    }

    /// A round is under way.
    pub(crate) fn is_busy(&self) -> bool {
        self.round.is_some()
    }

    fn round(&mut self) -> &mut Round {
        self.round.as_mut().expect("its operations end before it does")
    }

    /// The live map says what the disk does of a block; for the self-check.
    pub(crate) fn fits(&self, block: Block, place: Place) -> bool {
        match self.live.get(block) {
            Some(BlockState::Base) => matches!(place, Place::Base | Place::Zero),
            Some(BlockState::File) => place == Place::Overflow(Location(block.0), 0),
            Some(BlockState::Zero) => place == Place::Zero,
            None => false,
        }
    }
}

/// A new `meta` becomes what the live map says. One that an earlier process has left is the newer of the two.
pub(super) fn load_states(map: &BlockMap, live: &mut StateMap) -> Result<(), DiskError> {
    let meta = map.meta();
    if live.pages() != map.blocks().div_ceil(STATE_PAGE_BLOCKS) {
        return Err(DiskError::Damaged("the file's map is of another size".into()));
    }
    if meta.has_states() {
        return Ok(());
    }
    live.load();
    for region in 0..meta.regions() {
        let blocks = map.blocks_of(region);
        let mut entries = [Entry::BASE; REGION_BLOCKS];
        for (entry, block) in entries.iter_mut().zip(blocks.clone()) {
            *entry = match live.get(Block(block)) {
                Some(BlockState::Base) => Entry::BASE,
                Some(BlockState::File) => Entry::overflow(Location(block), 0),
                Some(BlockState::Zero) => Entry::ZERO,
                None => return Err(DiskError::Damaged(format!("the file's map: block {block}"))),
            };
        }
        let all = |entry: Entry| entries[..blocks.len()].iter().all(|&e| e == entry);
        match meta.region(region) {
            RegionState::Untouched if all(Entry::BASE) => {}
            RegionState::Untouched if all(Entry::ZERO) => meta.set_region(region, RegionState::Zero),
            RegionState::Zero if all(Entry::ZERO) || map.is_beyond_base(region) && all(Entry::BASE) => {}
            state => {
                for (block, entry) in (blocks.start..).zip(entries) {
                    if state != RegionState::Mapped || meta.entry(Block(block)) != entry {
                        meta.set_entry(Block(block), entry);
                    }
                }
                meta.set_region(region, RegionState::Mapped);
            }
        }
    }
    meta.set_has_states();
    Ok(())
}

/// Makes the live map what the adopted `meta` says, in shared memory too: a process may have died between the two, or the page
/// cache may have fallen back to what the file has.
pub(super) fn adopt_states(map: &BlockMap, mut live: StateMap) -> Persistent {
    let meta = map.meta();
    for region in 0..meta.regions() {
        let state = meta.region(region);
        for block in map.blocks_of(region).map(Block).filter(|_| state != RegionState::Untouched) {
            let place = match state {
                RegionState::Zero => Place::Zero,
                _ => meta.entry(block).place(),
            };
            match place {
                Place::Base => {}
                Place::Zero => live.set_unshared(block, BlockState::Zero),
                Place::Ram(_) | Place::Overflow(..) => live.set_unshared(block, BlockState::File),
            }
        }
    }
    let mut persistent = Persistent::new(live);
    if meta.is_marked() {
        // What the medium has of the map is of no use: all of it is written before the mark goes.
        (0..persistent.live.pages()).for_each(|page| persistent.changed.insert(page));
    }
    persistent
}

impl InPlace {
    /// A write that was to be on the medium when it ended has failed: see [`Persistent::store_live_again`]. The kernel says
    /// once that a page was lost: an fdatasync that is under way may end well, and have left that page out.
    pub(super) fn stable_write_failed(&mut self, errno: Errno) {
        if let Some(p) = &mut self.persistent {
            p.store_live_again();
            if let Some(round) = &mut p.round {
                round.errno.get_or_insert(errno);
            }
        }
    }

    /// One of the request's operations: it ends when all that has completed so far is on the medium.
    pub(super) fn join_flush<I: Io>(&mut self, shared: &mut Shared, io: &mut I, id: Id) {
        self.persistent().waiters.push(id);
        self.begin_round(shared, io);
    }

    /// In mode `persistent`: whether the medium may say something else of these blocks than the live map does.
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

    /// Brings everything to the medium, for whoever stops: no request may be unfinished or arrive meanwhile. `None`: it is
    /// on its way; call again after each [`Disk::end_turn`].
    pub fn put_away<I: Io>(&mut self, shared: &mut Shared, io: &mut I) -> Option<Result<(), Errno>> {
        let unmark = shared.map.meta().is_marked();
        let (draining, rests) = (shared.drain.is_needed(), shared.drain.rests(shared.now_ns()));
        let Some(p) = &mut self.persistent else { return Some(Ok(())) };
        if draining {
            // An earlier page of the map may still land. A barrier that fails may do so for ever.
            return rests.then_some(Err(Errno::IO));
        }
        if p.round.is_some() {
            return None;
        }
        let put_away = p.put_away.take();
        if put_away.is_none() {
            p.start_round(unmark, true);
            self.go_on_round(shared, io);
        }
        put_away
    }

    /// The next step of the round: pages, as they are now, into a staging buffer, and an fdatasync of the content that they
    /// tell of; or behind the last pages an fdatasync for those.
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

    /// The round's fdatasync has ended.
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

    /// The staged pages go to their places in the durable map: page 0 there is the mark's.
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

    /// One of the round's writes has ended.
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

    /// What it was to bring to the medium may be there or not: all of it is to be written again.
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
            p.put_away = Some(result);
        }
        for id in round.waiters {
            shared.admission.operation_done(id, result);
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

    /// The mark is written, or was not.
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
            // One that was not written, as far as is known, is tried again.
            (true, _) => {
                if let Err(errno) = result {
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

    /// Nothing is left in the live map: the rest of the reset is a FLUSH's to bring to the medium, where its mark is.
    pub(super) fn forget_states(&mut self) {
        let Some(p) = &mut self.persistent else { return };
        p.live.clear();
        (0..p.live.pages()).for_each(|page| p.changed.insert(page));
        p.mark = Mark::Unwritten;
    }
}

impl Persistent {
    fn start_round(&mut self, unmark: bool, last: bool) {
        let pages = self.changed.take();
        let mut members = Pages::none(self.live.pages());
        pages.iter().for_each(|&page| members.insert(page));
        self.round = Some(Round {
            waiters: std::mem::take(&mut self.waiters),
            pages,
            members,
            done: 0,
            staged: None,
            writes: 0,
            errno: None,
            unmark,
            last,
        });
    }
}

fn count_pages(shared: &Shared, pages: u32) {
    shared.counters().overflow.write(u64::from(pages) * BLOCK_BYTES as u64);
    add(&shared.counters().summaries, u64::from(pages));
}

//! Mode `persistent`: the map of where each block is, which outlives all processes. The *live* map is shared memory; the *durable*
//! map is its copy on the medium.
//!
//! Owns the live map and the set of pages that differ from the durable map; `flush` writes those. Invariant: a page that may have
//! been lost in a write that failed counts as changed. Why: `docs/design/031-persistent.md`.

use crate::engine::in_place::states::StateMap;
use crate::entry::{Entry, Place};
use crate::error::{DiskError, Errno};
use crate::io::PartId;
use crate::map::BlockMap;
use crate::table::Id;
use spillway_layout::{Block, BlockState, Location, REGION_BLOCKS, RegionState, STATE_PAGE_BLOCKS};
use std::ops::Range;

/// A set of pages of the map.
pub(super) struct Pages(Vec<u64>);

impl Pages {
    pub fn none(pages: u32) -> Pages {
        Pages(vec![0; pages.div_ceil(64) as usize])
    }

    pub fn insert(&mut self, page: u32) {
        self.0[page as usize / 64] |= 1 << (page % 64);
    }

    pub fn contains(&self, page: u32) -> bool {
        self.0[page as usize / 64] >> (page % 64) & 1 != 0
    }

    /// Takes all pages out of the set, in order.
    pub fn take(&mut self) -> Vec<u32> {
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

/// The live map, and the pages of it that the medium may not have yet.
pub(super) struct Persistent {
    pub live: StateMap,
    /// Pages of which the medium may have an earlier state.
    pub changed: Pages,
    /// Requests that wait for the next round of FLUSH.
    pub waiters: Vec<Id>,
    pub round: Option<Round>,
    /// The result of the round that brought everything to the medium before the process ends.
    pub make_durable: Option<Result<(), Errno>>,
    /// A reset has begun to write its mark, or the mark is on the medium.
    pub mark: Mark,
    /// The mark may be on the medium and no round has begun since the reset, or since this process attached.
    pub is_reset_unflushed: bool,
}

/// How far the mark of a reset is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mark {
    Unwritten,
    UnderWay,
    Written,
}

/// One FLUSH, for all requests that asked for one before it began.
pub(super) struct Round {
    pub waiters: Vec<Id>,
    /// The pages that had changed when it began; those before `done` are written.
    pub pages: Vec<u32>,
    /// The same as a set.
    pub members: Pages,
    pub done: usize,
    /// The staging buffer with the next pages as they were when the fdatasync began, and how many these are.
    pub staged: Option<(PartId, usize)>,
    /// Writes in flight.
    pub writes: u32,
    pub errno: Option<Errno>,
    /// The mark of a reset is to be taken off the medium at the end.
    pub unmark: bool,
    /// It is for the end of the process, and for no request.
    pub last: bool,
}

impl Persistent {
    pub fn new(live: StateMap) -> Persistent {
        let pages = live.pages();
        let mut changed = Pages::none(pages);
        // It is not known which pages of either map an earlier process has brought to the medium. Writing them again is harmless.
        let used = |&page: &u32| !live.is_clear(page) || !live.is_shared_clear(page);
        for page in (0..pages).filter(used) {
            changed.insert(page);
            live.store_page(page);
        }
        Persistent {
            live,
            changed,
            waiters: Vec::new(),
            round: None,
            make_durable: None,
            mark: Mark::Unwritten,
            is_reset_unflushed: false,
        }
    }

    /// Sets the state of these blocks.
    #[cfg_attr(feature = "crash-points", track_caller)]
    pub fn set(&mut self, blocks: Range<u32>, state: BlockState) {
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

    /// Whether the map on the medium equals the live map for these blocks.
    pub fn is_stable(&self, blocks: Range<u32>) -> bool {
        let mut pages = blocks.start / STATE_PAGE_BLOCKS..blocks.end.div_ceil(STATE_PAGE_BLOCKS);
        !pages.any(|page| self.changed.contains(page) || self.round_has(page))
    }

    /// Stores all pages that changed since the last FLUSH again, after the kernel has reported a failed write. It treats such a
    /// page as written, may evict it, and then reads an earlier one.
    pub fn store_live_again(&self) {
        let changed = |&page: &u32| self.changed.contains(page) || self.round_has(page);
        (0..self.live.pages()).filter(changed).for_each(|page| self.live.store_page(page));
    }

    pub fn round_has(&self, page: u32) -> bool {
        self.round.as_ref().is_some_and(|round| round.members.contains(page))
    }

    /// Whether a round is in progress.
    pub fn is_busy(&self) -> bool {
        self.round.is_some()
    }

    pub fn round(&mut self) -> &mut Round {
        self.round.as_mut().expect("its operations end before it does")
    }

    /// Whether the live map agrees with the place of a block; for the self-check.
    pub fn fits(&self, block: Block, place: Place) -> bool {
        match self.live.get(block) {
            Some(BlockState::Base) => matches!(place, Place::Base | Place::Zero),
            Some(BlockState::File) => place == Place::Overflow(Location(block.0), 0),
            Some(BlockState::Zero) => place == Place::Zero,
            None => false,
        }
    }
}

/// Fills a new `meta` from the live map. A `meta` of an earlier process is newer than the live map, and stays.
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

/// Makes the live map equal to the adopted `meta`, in shared memory too. A process may have died between the two stores, or the
/// page cache may have fallen back to the file's state.
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
        // The map on the medium is outdated: all of it is written before the mark is removed.
        (0..persistent.live.pages()).for_each(|page| persistent.changed.insert(page));
        persistent.is_reset_unflushed = true;
    }
    persistent
}

impl Persistent {
    pub fn start_round(&mut self, unmark: bool, last: bool) {
        self.is_reset_unflushed = false;
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

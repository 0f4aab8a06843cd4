//! What a disk must read as: for each sector the version that was written last, and, where a write failed or
//! was cut off, the versions that it may have left.

use spillway_core::{BLOCK_SECTORS, REGION_BLOCKS, SECTOR_BYTES};
use std::collections::BTreeMap;

pub type Version = u32;
/// The base image's content.
pub const BASE: Version = 0;
/// All zeroes.
pub const ZERO: Version = u32::MAX;

const MASK: u64 = 0x5A5A_0000_A5A5_FFFF;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum State {
    Unfinished,
    Done,
    Failed,
}

#[derive(Clone, Debug)]
struct Write {
    version: Version,
    /// Number of the request that wrote it.
    request: u64,
    state: State,
}

/// A version that a power loss may bring back.
#[derive(Clone, Debug)]
struct Past {
    version: Version,
    request: u64,
    /// When it was acknowledged.
    done: Option<u64>,
}

pub struct Oracle {
    base_sectors: u64,
    sectors: Vec<Vec<Write>>,
    /// Of each sector the version that was made stable last, and those after it.
    past: Vec<Vec<Past>>,
    /// Requests that have ended.
    pub now: u64,
    /// Blocks that completed writes touched since the last reset, by region.
    pub blocks_written: BTreeMap<u64, u64>,
}

/// The words of a sector's content in a version.
fn words(version: Version, sector: u64) -> impl Iterator<Item = [u8; 8]> {
    let (word, step) =
        if version == ZERO { (0, 0) } else { ((u64::from(version) << 32 | sector) ^ MASK, 1 << 48) };
    (0..SECTOR_BYTES / 8).map(move |i| word.wrapping_add(i * step).to_le_bytes())
}

/// Content of a sector in a version.
pub fn fill(version: Version, sector: u64, out: &mut [u8]) {
    for (chunk, word) in out.as_chunks_mut().0.iter_mut().zip(words(version, sector)) {
        *chunk = word;
    }
}

/// The version that a sector's content begins like, if it is not zeroes.
pub fn version_of(content: &[u8]) -> Option<Version> {
    let word = u64::from_le_bytes(content[..8].try_into().expect("eight bytes"));
    (word != 0).then_some(((word ^ MASK) >> 32) as Version)
}

fn is(version: Version, sector: u64, content: &[u8]) -> bool {
    let (chunks, rest) = content.as_chunks();
    rest.is_empty() && chunks.iter().copied().eq(words(version, sector))
}

impl Oracle {
    pub fn new(sectors: u64, base_sectors: u64) -> Oracle {
        let mut oracle = Oracle {
            base_sectors,
            sectors: vec![Vec::new(); sectors as usize],
            past: vec![Vec::new(); sectors as usize],
            now: 0,
            blocks_written: BTreeMap::new(),
        };
        oracle.reset();
        oracle
    }

    pub fn reset(&mut self) {
        self.blocks_written.clear();
        for (i, s) in self.sectors.iter_mut().enumerate() {
            let version = if (i as u64) < self.base_sectors { BASE } else { ZERO };
            s.clear();
            s.push(Write { version, request: 0, state: State::Done });
            self.past[i] = vec![Past { version, request: 0, done: Some(0) }];
        }
    }

    /// What was acknowledged up to then is stable.
    pub fn flushed(&mut self, then: u64) {
        for past in &mut self.past {
            let stable = past.iter().rposition(|p| p.done.is_some_and(|done| done <= then));
            past.drain(..stable.unwrap_or(0));
        }
    }

    /// What this request wrote there is stable.
    pub fn stable(&mut self, sectors: std::ops::Range<u64>, request: u64) {
        for sector in sectors {
            let past = &mut self.past[sector as usize];
            let stable = past.iter().position(|p| p.request == request);
            past.drain(..stable.unwrap_or(0));
        }
    }

    /// Power was lost: each sector is one of what it may be, and stays that.
    pub fn lose_power(&mut self) {
        self.crash();
        for (past, writes) in self.past.iter_mut().zip(&mut self.sectors) {
            // Which it is only the next write makes certain.
            past[1..].iter_mut().for_each(|p| p.done = None);
            let write = |p: &Past| Write { version: p.version, request: 0, state: State::Failed };
            *writes = past.iter().map(write).collect();
            writes[0].state = State::Done;
        }
    }

    /// A request that gives this sector a version is submitted.
    pub fn written(&mut self, sector: u64, version: Version, request: u64) {
        self.sectors[sector as usize].push(Write { version, request, state: State::Unfinished });
        self.past[sector as usize].push(Past { version, request, done: None });
    }

    /// It has ended.
    pub fn ended(&mut self, sectors: std::ops::Range<u64>, request: u64, state: State) {
        self.now += 1;
        for sector in sectors {
            if state == State::Done {
                let mut past = self.past[sector as usize].iter_mut();
                past.find(|p| p.request == request).into_iter().for_each(|p| p.done = Some(self.now));
            }
            let writes = &mut self.sectors[sector as usize];
            if let Some(i) = writes.iter().position(|w| w.request == request && w.state == State::Unfinished)
            {
                writes[i].state = state;
                if state == State::Done {
                    writes.drain(..i);
                }
            }
        }
    }

    /// A write has been acknowledged.
    pub fn acknowledged(&mut self, sectors: &std::ops::Range<u64>) {
        for block in sectors.start / BLOCK_SECTORS..sectors.end.div_ceil(BLOCK_SECTORS) {
            *self.blocks_written.entry(block / REGION_BLOCKS as u64).or_default() += 1;
        }
    }

    /// Checks what a read, submitted as number `request`, found; and remembers it where several answers were
    /// right, so that the content cannot change back.
    pub fn check(&mut self, sector: u64, content: &[u8], request: u64) {
        let writes = &mut self.sectors[sector as usize];
        let before = writes.iter().take_while(|w| w.request < request).count();
        let mut i = before;
        while i > 0 {
            i -= 1;
            let w = &writes[i];
            assert_ne!(w.state, State::Unfinished, "sector {sector}: the read passed write {w:?}");
            if is(w.version, sector, content) {
                if before > 1 {
                    // Two of them may look alike: an earlier read, still under way, may see the earlier one.
                    let found = Write { state: State::Done, request: writes[0].request, version: w.version };
                    writes.splice(..before, [found]);
                }
                return;
            }
            if w.state == State::Done {
                break;
            }
        }
        panic!(
            "sector {sector} (block {}): read {request} found {:02x?}.., expected one of {:x?}; then {:x?}",
            sector / BLOCK_SECTORS,
            &content[..16],
            &writes[i..before],
            &writes[before..]
        );
    }

    /// Every request that has not ended is cut off.
    pub fn crash(&mut self) {
        for writes in &mut self.sectors {
            for w in writes.iter_mut() {
                if w.state == State::Unfinished {
                    w.state = State::Failed;
                }
                w.request = 0;
            }
        }
        // Their numbers are given anew.
        self.past.iter_mut().flatten().for_each(|p| p.request = 0);
    }
}

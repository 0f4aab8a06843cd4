//! Attaching to memory that a fault has changed: refused, or attached and working; never a panic.

use spillway_core::{
    BLOCK_BYTES, Counters, DataMemory, Disk, DiskError, DiskSpec, FullPolicy, LAYOUT_VERSION, Layout,
    LogShape, Meta, Mode,
};

const SPEC: DiskSpec = DiskSpec {
    size_bytes: 600 * BLOCK_BYTES as u64,
    base_bytes: 0,
    mode: Mode::RamOverflow,
    full: FullPolicy::Fail,
    ram_limit_bytes: 16 * BLOCK_BYTES as u64,
    overflow_limit_bytes: 20 * 8 * BLOCK_BYTES as u64,
    shape: LogShape { segment_blocks: 8, part_blocks: 4 },
};

const DISK_ID: u64 = 7;

/// The memory of a new disk.
struct Memory(Vec<u64>);

impl Memory {
    fn new() -> Memory {
        let mut memory = Memory(vec![0; (Layout::of(&SPEC).len_bytes() as usize + 4096) / 8]);
        drop(memory.attach().expect("zeroed memory becomes a disk"));
        memory
    }

    fn base(&mut self) -> *mut u8 {
        let start = self.0.as_mut_ptr().cast::<u8>();
        start.wrapping_add(start.align_offset(4096))
    }

    fn attach(&mut self) -> Result<Disk, DiskError> {
        // SAFETY: the memory is longer than the layout by a page and outlives the disk.
        let (meta, existing) = unsafe { Meta::open(self.base(), &SPEC, DISK_ID) }?;
        Disk::attach(meta, existing, SPEC, DataMemory { bytes: SPEC.ram_limit_bytes, huge_pages: false })
    }

    fn write(&mut self, at: u64, word: u64) {
        assert!(at.is_multiple_of(8) && at < Layout::of(&SPEC).len_bytes());
        // SAFETY: inside the memory, aligned, and no disk is attached.
        unsafe { self.base().add(at as usize).cast::<u64>().write(word) }
    }

    fn read(&mut self, at: usize) -> u64 {
        assert!(at.is_multiple_of(8) && at < 4096);
        // SAFETY: inside the memory, aligned, and no disk is attached.
        unsafe { self.base().add(at).cast::<u64>().read() }
    }

    /// Why nobody can attach.
    fn refused(&mut self) -> String {
        match self.attach() {
            Err(DiskError::Damaged(why)) => why,
            other => panic!("{other:?}"),
        }
    }

    /// Marks region 0 as mapped and gives its first block this entry; all segments have been used.
    fn map(&mut self, entry: u64) {
        let map = Layout::of(&SPEC).map_range().start;
        self.write(64, 20);
        self.write(map - 4096, 1);
        self.write(map, entry);
    }
}

#[test]
fn an_entry_that_points_nowhere_is_refused() {
    for (entry, fits) in [
        (0, true),
        (1 << 62, true),
        (2 << 62 | 15, true),
        (2 << 62 | 16, false),
        (2 << 62 | 1 << 40, false),
        (3 << 62 | 6 << 32, true),
        (3 << 62 | 7 << 32, false),
        (3 << 62 | 160 << 32, false),
    ] {
        let mut memory = Memory::new();
        memory.map(entry);
        assert_eq!(memory.attach().is_ok(), fits, "{entry:#x}");
        // Without its magic number the memory would be taken for new, and its map for an empty one.
        let mut memory = Memory::new();
        memory.map(entry);
        memory.write(0, 0);
        // A new disk has used no segment yet.
        let fits = fits && entry >> 62 != 3;
        assert_eq!(memory.attach().is_ok(), fits, "{entry:#x}, no magic number");
    }
}

#[test]
fn two_entries_with_one_place_are_refused() {
    for (entry, other, fits) in [
        (2 << 62 | 15, 2 << 62 | 14, true),
        (2 << 62 | 15, 2 << 62 | 15, false),
        (3 << 62 | 6 << 32, 3 << 62 | 5 << 32, true),
        (3 << 62 | 6 << 32, 3 << 62 | 6 << 32 | 1, false),
    ] {
        let mut memory = Memory::new();
        memory.map(entry);
        memory.write(Layout::of(&SPEC).map_range().start + 8 * 300, other);
        assert_eq!(memory.attach().is_ok(), fits, "{entry:#x} and {other:#x}");
    }
}

#[test]
fn counters_that_make_no_sense_attach() {
    let counters = Layout::COUNTERS_AT..Layout::COUNTERS_AT + size_of::<Counters>() as u64;
    for at in counters.step_by(8) {
        let mut memory = Memory::new();
        memory.write(at, u64::MAX - 1);
        let disk = memory.attach().expect("counters decide nothing");
        disk.counters().read_latency.quantile_ns(0.99);
    }
}

#[test]
fn a_log_that_was_larger_and_a_reset_that_was_cut_off_attach() {
    for at in [64, 72] {
        // Segments beyond the limit, in use and in the file: a log that was larger once.
        let mut memory = Memory::new();
        memory.write(at, 1000);
        memory.attach().expect("a limit that has become lower").check();
    }
    let mut memory = Memory::new();
    let generation = memory.read(48);
    memory.write(56, generation);
    let disk = memory.attach().expect("a reset that was cut off is finished");
    assert_eq!(disk.generation(), 2);
}

/// The generation says which of two directories counts: one that a fault has changed would forget all that was written.
#[test]
fn a_generation_that_was_never_stored_is_refused() {
    let found = Memory::new().read(48);
    for word in (0..64).map(|bit| found ^ 1 << bit).chain([0, 1, u64::MAX]) {
        let mut memory = Memory::new();
        memory.write(48, word);
        assert_eq!(memory.refused(), format!("generation {word:#018x} was never stored"));
    }
}

#[test]
fn memory_of_another_layout_or_disk_is_refused_in_words() {
    for (at, word, why) in [
        (0, 77, "no disk here (magic 0x000000000000004d)".into()),
        (
            8,
            LAYOUT_VERSION + 1,
            format!("layout version {}, this program knows {LAYOUT_VERSION}", LAYOUT_VERSION + 1),
        ),
        (16, 599 * 4096, format!("disk size is {}, expected {}", 599 * 4096, SPEC.size_bytes)),
        (24, 4096, "base image size is 4096, expected 0".into()),
        (32, 7, format!("mode is 7, expected {}", SPEC.mode as u64)),
        (40, 16, "segment size is 16, expected 8".into()),
        (88, 8, "disk number is 8, expected 7".into()),
    ] {
        let mut memory = Memory::new();
        memory.write(at, word);
        assert_eq!(memory.refused(), why);
    }
}

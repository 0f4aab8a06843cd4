//! What reports show, and what each is made of.
//!
//! Owns the list. Invariant: a metric is a sum of columns of [`super::Samples`], nothing else.

/// From where it is seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum View {
    /// What the host's storage and processors have to do.
    Host,
    /// What the machine asked for, and what it counted by itself.
    Machine,
    /// Where the cache served it.
    Cache,
}

/// What is made of the columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// They are sums that grow: their growth in a second.
    Rate,
    /// They are levels.
    Level,
}

/// Which way is good.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Better {
    /// Lower is better.
    Lower,
    /// Neither: it says what happened.
    Neither,
}

/// One thing that is shown.
#[derive(Clone, Copy, Debug)]
pub struct Metric {
    /// Its name in files.
    pub key: &'static str,
    /// From where it is seen.
    pub view: View,
    /// A heading.
    pub title: &'static str,
    /// What one of it is, after `scale`.
    pub unit: &'static str,
    /// What is made of the columns.
    pub kind: Kind,
    /// What is added up.
    pub columns: &'static [&'static str],
    /// What the sum is multiplied by.
    pub scale: f64,
    /// Which way is good.
    pub better: Better,
    /// What must be said with it.
    pub note: &'static str,
    /// What must be said besides where a disk stands on a storage model.
    pub on_model: &'static str,
}

/// Sums that grow, one of which is shown as one.
const fn rate(
    key: &'static str,
    view: View,
    title: &'static str,
    unit: &'static str,
    columns: &'static [&'static str],
) -> Metric {
    let (kind, better) = (Kind::Rate, Better::Lower);
    Metric { key, view, title, unit, kind, columns, scale: 1.0, better, note: "", on_model: "" }
}

/// Bytes of the cache, shown as MB.
const fn level(key: &'static str, title: &'static str, columns: &'static [&'static str]) -> Metric {
    let (view, unit, kind, better) = (View::Cache, "MB", Kind::Level, Better::Lower);
    Metric { key, view, title, unit, kind, columns, scale: 1e-6, better, note: "", on_model: "" }
}

impl Metric {
    const fn times(mut self, scale: f64) -> Metric {
        self.scale = scale;
        self
    }

    const fn neither(mut self) -> Metric {
        self.better = Better::Neither;
        self
    }

    const fn note(mut self, note: &'static str) -> Metric {
        self.note = note;
        self
    }

    const fn on_model(mut self, note: &'static str) -> Metric {
        self.on_model = note;
        self
    }
}

const GUEST_COUNTS: &str = "counted inside of the machine";
const POLLS: &str =
    "on a storage model the worker polls in the last 40 us before a completion is due; that time is in it";
const DRIVER: &str = "what a driver inside of the machine would have shown, whose overflow disk is the machine's own: \
                      the machine's and the overflow's added up, as in seed 000; where there is no cache, \
                      the machine's";

/// All of them, in the order of a report.
pub const METRICS: &[Metric] = {
    use View::{Cache, Host, Machine};
    &[
        rate(
            "host-cpu",
            Host,
            "Processor of the host: disk's worker and VMM",
            "% of a core",
            &["cpu.worker_s", "cpu.vmm_s"],
        )
        .times(100.0)
        .on_model(POLLS),
        rate(
            "host-cpu-worker",
            Host,
            "Processor of the host: disk's worker",
            "% of a core",
            &["cpu.worker_s"],
        )
        .times(100.0)
        .on_model(POLLS),
        rate("host-cpu-vmm", Host, "Processor of the host: VMM", "% of a core", &["cpu.vmm_s"]).times(100.0),
        rate(
            "host-reads",
            Host,
            "Reads of the host's storage",
            "reads/s",
            &["planes.base.store_reads", "planes.overflow.reads"],
        )
        .note("base image's store and overflow (or difference file)"),
        rate("host-writes", Host, "Writes to the host's storage", "writes/s", &["planes.overflow.writes"])
            .note("overflow or difference file; the base image is never written"),
        rate(
            "host-read-bytes",
            Host,
            "Read from the host's storage",
            "MB/s",
            &["planes.base.store_read_bytes", "planes.overflow.read_bytes"],
        )
        .times(1e-6),
        rate(
            "host-written-bytes",
            Host,
            "Written to the host's storage",
            "MB/s",
            &["planes.overflow.written_bytes"],
        )
        .times(1e-6),
        rate(
            "host-base-reads",
            Host,
            "Reads of the base image's store",
            "reads/s",
            &["planes.base.store_reads"],
        )
        .note("what the host's page cache did not have"),
        rate(
            "host-base-read-bytes",
            Host,
            "Read from the base image's store",
            "MB/s",
            &["planes.base.store_read_bytes"],
        )
        .times(1e-6),
        rate(
            "host-overflow-io",
            Host,
            "Reads and writes of the overflow",
            "requests/s",
            &["planes.overflow.reads", "planes.overflow.writes"],
        )
        .note("or of the difference file"),
        rate("machine-cpu", Machine, "Processor inside of the machine", "% of a core", &["inside.cpu_s"])
            .times(100.0)
            .note(GUEST_COUNTS),
        rate("machine-reads", Machine, "Reads inside of the machine", "reads/s", &["inside.reads"])
            .neither()
            .note(GUEST_COUNTS),
        rate("machine-writes", Machine, "Writes inside of the machine", "writes/s", &["inside.writes"])
            .neither()
            .note(GUEST_COUNTS),
        rate("machine-read-bytes", Machine, "Read inside of the machine", "MB/s", &["inside.read_bytes"])
            .times(1e-6)
            .neither()
            .note(GUEST_COUNTS),
        rate(
            "machine-written-bytes",
            Machine,
            "Written inside of the machine",
            "MB/s",
            &["inside.written_bytes"],
        )
        .times(1e-6)
        .neither()
        .note(GUEST_COUNTS),
        rate(
            "driver-reads",
            Machine,
            "Reads as a cache inside of the machine counts them",
            "reads/s",
            &["inside.reads", "planes.overflow.reads"],
        )
        .neither()
        .note(DRIVER),
        rate(
            "driver-writes",
            Machine,
            "Writes as a cache inside of the machine counts them",
            "writes/s",
            &["inside.writes", "planes.overflow.writes"],
        )
        .neither()
        .note(DRIVER),
        rate(
            "driver-written-bytes",
            Machine,
            "Written as a cache inside of the machine counts it",
            "MB/s",
            &["inside.written_bytes", "planes.overflow.written_bytes"],
        )
        .times(1e-6)
        .neither()
        .note(DRIVER),
        rate(
            "guest-reads",
            Machine,
            "Reads that the machine asked of its disk",
            "reads/s",
            &["planes.guest.reads"],
        )
        .neither()
        .note("counted by the disk"),
        rate(
            "guest-writes",
            Machine,
            "Writes that the machine asked of its disk",
            "writes/s",
            &["planes.guest.writes"],
        )
        .neither()
        .note("counted by the disk"),
        level("ram-used", "RAM of the cache in use", &["ram.used_bytes"]),
        rate("ram-reads", Cache, "Reads from the RAM tier", "reads/s", &["planes.ram.reads"]).neither(),
        rate("ram-writes", Cache, "Writes to the RAM tier", "writes/s", &["planes.ram.writes"]).neither(),
        level("overflow-used", "Overflow in use", &["overflow.used_bytes"]),
        level("overflow-file", "Size of the overflow file", &["overflow.file_bytes"]),
        rate("overflow-reads", Cache, "Reads of the overflow", "reads/s", &["planes.overflow.reads"]),
        rate("overflow-read-bytes", Cache, "Read from the overflow", "MB/s", &["planes.overflow.read_bytes"])
            .times(1e-6),
        rate("overflow-writes", Cache, "Writes to the overflow", "writes/s", &["planes.overflow.writes"])
            .note("a write is a part of a segment: many blocks"),
        rate(
            "overflow-written-bytes",
            Cache,
            "Written to the overflow",
            "MB/s",
            &["planes.overflow.written_bytes"],
        )
        .times(1e-6),
        rate("evicted", Cache, "Evicted from the RAM tier", "blocks/s", &["evictions.blocks"]),
        rate("stalls", Cache, "Writes that waited for space", "ms/s", &["stalls.ns"]).times(1e-6),
        rate("base-reads", Cache, "Reads of the base image", "reads/s", &["planes.base.reads"])
            .neither()
            .note("the host's page cache may have served them"),
    ]
};

/// Everything that the host's storage is asked.
pub const HOST_IO: Metric = rate(
    "host-io",
    View::Host,
    "Reads and writes of the host's storage",
    "requests/s",
    &["planes.base.store_reads", "planes.overflow.reads", "planes.overflow.writes"],
);
/// Everything that machines ask.
pub const GUEST_IO: Metric = rate(
    "guest-io",
    View::Machine,
    "Reads and writes that machines asked of their disks",
    "requests/s",
    &["planes.guest.reads", "planes.guest.writes"],
);
/// Sums over several of [`METRICS`], without a picture: for tables.
pub const SUMS: [Metric; 2] = [HOST_IO, GUEST_IO];

/// One of all by its key.
pub fn named(key: &str) -> Option<&'static Metric> {
    METRICS.iter().chain(&SUMS).find(|metric| metric.key == key)
}

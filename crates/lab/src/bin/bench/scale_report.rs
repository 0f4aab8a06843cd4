//! What the scale part found: as figures, as a table, against its targets, and where Spillway loses.
//!
//! Invariant: each figure shown is the median of the rounds that are kept.

use crate::checks::{Asked, Check, check};
use crate::environment::Origin;
use comfy_table::{CellAlignment, Table, presets};
use serde::Serialize;
use spillway_testkit::cores::median;

const MIB: f64 = 1048576.0;
/// What is promised: a reset's answer, memory given back after it, and what an idle disk of the smallest size holds.
const RESET_MS: f64 = 10.0;
const BACK_MS: f64 = 2000.0;
const IDLE_MIB: f64 = 8.0;
/// A figure that is so many times that of the smallest disk does not scale.
const GROWN: f64 = 2.0;

/// Everything that was found, as it is kept.
#[derive(Serialize)]
pub struct Scale {
    /// Form of this file.
    pub schema: u32,
    /// Where it was found.
    #[serde(flatten)]
    pub origin: Origin,
    /// Limit of the RAM tier.
    pub ram_bytes: u64,
    /// Limit of the overflow.
    pub overflow_bytes: u64,
    /// What was written to each disk, in blocks as far apart as they fit.
    pub written_bytes: u64,
    /// The disks.
    pub sizes: Vec<Size>,
    /// What was asked for.
    pub checks: Vec<Check>,
    /// Where Spillway loses, in words.
    pub losses: Vec<String>,
}

/// Disks of one size.
#[derive(Serialize)]
pub struct Size {
    /// The size.
    pub bytes: u64,
    /// How the last one was started.
    pub command: String,
    /// One a round.
    pub lives: Vec<Life>,
}

/// What one disk took, in the order of its life.
#[derive(Serialize)]
pub struct Life {
    /// From the start of the program to its line that it is ready.
    pub ready_ms: f64,
    /// What it held then.
    pub ready: Memory,
    /// With a VMM connected that has written a little.
    pub idle: Memory,
    /// The time that all of the writes took, sixteen at a time.
    pub write_seconds: f64,
    /// After them.
    pub written: Memory,
    /// The block map then, by its own gauge.
    pub map_bytes: u64,
    /// The longest request of a light load.
    pub undisturbed_ms: f64,
    /// The same where the worker was killed.
    pub death_ms: f64,
    /// From the start of `spillway reset` to its end.
    pub reset_ms: f64,
    /// From the same start until RAM tier and map held no memory.
    pub back_ms: f64,
    /// What it held then.
    pub after_reset: Memory,
}

/// What a disk holds beside the content of its RAM tier.
#[derive(Clone, Copy, Serialize)]
pub struct Memory {
    /// What both processes have mapped, each by its share (PSS), without memfds.
    pub own_bytes: u64,
    /// What the memfd with map and counters has allocated.
    pub meta_bytes: u64,
}

impl Memory {
    fn mib(self) -> f64 {
        (self.own_bytes + self.meta_bytes) as f64 / MIB
    }
}

impl Size {
    fn middle(&self, figure: impl Fn(&Life) -> f64) -> f64 {
        median(&mut self.lives.iter().map(figure).collect::<Vec<_>>())
    }

    fn name(&self) -> String {
        match self.bytes >> 30 {
            gib @ 1024.. => format!("{} TiB", gib >> 10),
            gib => format!("{gib} GiB"),
        }
    }
}

/// One column of the table: what it says of a disk.
struct Column {
    title: &'static str,
    unit: &'static str,
    figure: fn(&Life) -> f64,
    /// Whether it should stay as it is when the disk grows.
    is_constant: bool,
}

const COLUMNS: [Column; 9] = [
    Column { title: "start until ready", unit: "ms", figure: |l| l.ready_ms, is_constant: true },
    Column { title: "memory when ready", unit: "MiB", figure: |l| l.ready.mib(), is_constant: true },
    Column { title: "idle, used a little", unit: "MiB", figure: |l| l.idle.mib(), is_constant: true },
    Column { title: "after the writes", unit: "MiB", figure: |l| l.written.mib(), is_constant: false },
    Column { title: "of it the map", unit: "MiB", figure: |l| l.map_bytes as f64 / MIB, is_constant: false },
    Column { title: "longest request", unit: "ms", figure: |l| l.undisturbed_ms, is_constant: false },
    Column { title: "the same at a death", unit: "ms", figure: |l| l.death_ms, is_constant: true },
    Column { title: "reset until answered", unit: "ms", figure: |l| l.reset_ms, is_constant: true },
    Column { title: "until memory is back", unit: "ms", figure: |l| l.back_ms, is_constant: true },
];

impl Scale {
    /// Sets what was found against what is asked.
    pub fn new(origin: Origin, bytes: [u64; 3], sizes: Vec<Size>) -> Scale {
        let [ram_bytes, overflow_bytes, written_bytes] = bytes;
        let (checks, losses) = (checks(&sizes), losses(&sizes, written_bytes));
        Scale { schema: 1, origin, ram_bytes, overflow_bytes, written_bytes, sizes, checks, losses }
    }

    /// Prints everything for people.
    pub fn print(&self) {
        println!();
        self.origin.lines().iter().for_each(|line| println!("{line}"));
        let gib = |bytes: u64| bytes as f64 / f64::from(1 << 30);
        println!(
            "RAM {} GiB, overflow {} GiB; {} GiB written in blocks of 4 KiB, as far apart as they fit; medians of {} rounds\n\n{}\n",
            gib(self.ram_bytes),
            gib(self.overflow_bytes),
            gib(self.written_bytes),
            self.sizes.iter().map(|s| s.lives.len()).min().unwrap_or(0),
            self.table()
        );
        self.checks.iter().for_each(|c| println!("{}", c.line()));
        println!("\nWhere it loses:");
        self.losses.iter().for_each(|line| println!("  {line}"));
        if self.losses.is_empty() {
            println!("  nowhere");
        }
    }

    fn table(&self) -> Table {
        let mut table = Table::new();
        table.load_preset(presets::ASCII_MARKDOWN);
        let titles = COLUMNS.iter().map(|c| format!("{}, {}", c.title, c.unit));
        table.set_header(std::iter::once("disk".to_string()).chain(titles));
        for size in &self.sizes {
            let cells = COLUMNS.iter().map(|c| format!("{:.1}", size.middle(c.figure)));
            table.add_row(std::iter::once(size.name()).chain(cells));
        }
        table.column_iter_mut().for_each(|c| c.set_cell_alignment(CellAlignment::Right));
        table
    }
}

fn checks(sizes: &[Size]) -> Vec<Check> {
    let at_most = |size: &Size, words: &str, most: f64, figure: fn(&Life) -> f64| {
        let found = (!size.lives.is_empty()).then(|| {
            let worst = size.lives.iter().map(figure).fold(0.0, f64::max);
            (worst, format!("median {:.2}", size.middle(figure)))
        });
        check(format!("{}: {words} at most {most}", size.name()), Asked::AtMost(most), found)
    };
    let mut checks = Vec::new();
    for size in sizes {
        checks.push(at_most(size, "reset answered, in ms", RESET_MS, |l| l.reset_ms));
        checks.push(at_most(size, "its memory back, in ms", BACK_MS, |l| l.back_ms));
    }
    let smallest = sizes.first().map(|s| at_most(s, "idle, in MiB", IDLE_MIB, |l| l.idle.mib()));
    checks.extend(smallest);
    checks
}

/// What grows with the disk though it need not, and what the map takes for so little in each region.
fn losses(sizes: &[Size], written_bytes: u64) -> Vec<String> {
    let mut losses = Vec::new();
    let Some((smallest, larger)) = sizes.split_first() else { return losses };
    for size in larger {
        for column in COLUMNS.iter().filter(|c| c.is_constant) {
            let [before, now] = [smallest, size].map(|s| s.middle(column.figure));
            if now > before * GROWN {
                losses.push(format!(
                    "{}: {}: {now:.1} {}, {:.1} times what it is for {}",
                    size.name(),
                    column.title,
                    column.unit,
                    now / before,
                    smallest.name()
                ));
            }
        }
    }
    for size in sizes {
        let share = size.middle(|l| l.map_bytes as f64) / written_bytes as f64;
        if share > 0.1 {
            losses.push(format!("{}: the map takes {share:.2} bytes for each byte written", size.name()));
        }
        let kept = size.middle(|l| l.after_reset.mib() - l.idle.mib());
        if kept > 1.0 {
            losses.push(format!("{}: {kept:.1} MiB more are held after the reset than before", size.name()));
        }
    }
    losses
}

#[cfg(test)]
mod tests {
    use super::*;

    fn size(bytes: u64, reset_ms: f64) -> Size {
        let memory = Memory { own_bytes: 4 << 20, meta_bytes: 1 << 20 };
        let life = Life {
            ready_ms: 10.0,
            ready: memory,
            idle: memory,
            write_seconds: 1.0,
            written: memory,
            map_bytes: 1 << 20,
            undisturbed_ms: 1.0,
            death_ms: 5.0,
            reset_ms,
            back_ms: 100.0,
            after_reset: memory,
        };
        Size { bytes, command: String::new(), lives: vec![life] }
    }

    #[test]
    fn what_grows_with_the_disk_is_a_loss_and_beyond_its_target_a_miss() {
        let sizes = [size(4 << 30, 2.0), size(1 << 40, 11.0)];
        let losses = losses(&sizes, 1 << 30);
        assert_eq!(losses, ["1 TiB: reset until answered: 11.0 ms, 5.5 times what it is for 4 GiB"]);
        let missed: Vec<_> = checks(&sizes).into_iter().filter(|c| !c.pass).map(|c| c.asked).collect();
        assert_eq!(missed, ["1 TiB: reset answered, in ms at most 10"]);
    }

    #[test]
    fn a_large_map_for_little_content_is_a_loss() {
        assert_eq!(losses(&[size(4 << 30, 1.0)], 2 << 20).len(), 1);
    }
}

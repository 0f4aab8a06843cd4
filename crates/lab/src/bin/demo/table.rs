//! The demo's results for people: by plane, each scenario beside the baseline.
//!
//! Invariant: what is said to have reached a device is the kernel's count, not our own, wherever it can be read.

use crate::scenario::{Outcome, Plane};
use comfy_table::{CellAlignment, Table, presets};

/// One row: a figure of each outcome, and how it is written.
struct Row<'a> {
    name: String,
    figure: Box<dyn Fn(&Outcome) -> f64 + 'a>,
    unit: Unit,
    /// Whether a share of the baseline says something.
    share: bool,
}

#[derive(Clone, Copy)]
enum Unit {
    Count,
    Mib,
    Time,
    Seconds,
}

impl Unit {
    fn show(self, figure: f64) -> String {
        match self {
            Unit::Count => group(figure.round() as u64),
            Unit::Mib => format!("{:.1} MiB", figure / f64::from(1 << 20)),
            Unit::Seconds => format!("{figure:.1} s"),
            Unit::Time if figure >= 1e6 => format!("{:.1} ms", figure / 1e6),
            Unit::Time => format!("{:.1} us", figure / 1e3),
        }
    }
}

/// 1234567 as 1,234,567.
fn group(n: u64) -> String {
    let digits = n.to_string();
    let mut out = String::new();
    for (i, c) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(c);
    }
    out
}

fn row<'a>(name: &str, unit: Unit, share: bool, figure: impl Fn(&Outcome) -> f64 + 'a) -> Row<'a> {
    Row { name: name.to_string(), figure: Box::new(figure), unit, share }
}

fn plane<'a>(name: &str, of: impl Fn(&Outcome) -> Plane + Copy + 'a) -> Vec<Row<'a>> {
    vec![
        row(&format!("{name}: reads"), Unit::Count, true, move |o| of(o).reads as f64),
        row("writes", Unit::Count, true, move |o| of(o).writes as f64),
        row("reads + writes", Unit::Count, true, move |o| (of(o).reads + of(o).writes) as f64),
        row("read", Unit::Mib, true, move |o| of(o).read_bytes as f64),
        row("written", Unit::Mib, true, move |o| of(o).written_bytes as f64),
    ]
}

/// Bytes that the host read from and wrote to its devices for a run. The kernel's own count, which holds what it
/// read ahead of the image; where it is not to be had, Spillway's.
fn storage(o: &Outcome) -> (u64, u64) {
    let p = &o.stats.planes;
    o.storage_bytes.unwrap_or((p.base.store_read_bytes + p.overflow.read_bytes, p.overflow.written_bytes))
}

fn rows<'a>() -> Vec<Vec<Row<'a>>> {
    vec![
        plane("guest", |o| o.stats.planes.guest),
        plane("RAM tier", |o| o.stats.planes.ram),
        plane("overflow", |o| o.stats.planes.overflow),
        vec![
            row("base: reads", Unit::Count, true, |o| o.stats.planes.base.reads as f64),
            row("read", Unit::Mib, true, |o| o.stats.planes.base.read_bytes as f64),
            row("reads that waited for its store", Unit::Count, true, |o| {
                o.stats.planes.base.store_reads as f64
            }),
        ],
        vec![
            row("HOST'S DEVICES: read", Unit::Mib, true, |o| storage(o).0 as f64),
            row("written", Unit::Mib, true, |o| storage(o).1 as f64),
            row("read + written", Unit::Mib, true, |o| (storage(o).0 + storage(o).1) as f64),
        ],
        vec![
            row("latency: read p50", Unit::Time, true, |o| o.stats.latency.read.p50_ns as f64),
            row("read p99", Unit::Time, true, |o| o.stats.latency.read.p99_ns as f64),
            row("write p50", Unit::Time, true, |o| o.stats.latency.write.p50_ns as f64),
            row("write p99", Unit::Time, true, |o| o.stats.latency.write.p99_ns as f64),
        ],
        vec![
            row("time: boot", Unit::Seconds, true, |o| o.boot_seconds),
            row("all", Unit::Seconds, true, |o| o.total_seconds),
            row("CPU: in the guest", Unit::Seconds, true, |o| {
                o.last().map_or(0.0, |s| s.cpu.busy as f64 / 100.0)
            }),
            row("QEMU", Unit::Seconds, true, |o| o.qemu_cpu_seconds),
            row("spillway", Unit::Seconds, true, |o| o.spillway_cpu_seconds),
        ],
        vec![
            row("space: RAM tier, most", Unit::Mib, false, |o| o.stats.ram.peak_bytes as f64),
            row("RAM tier, after the trim", Unit::Mib, false, |o| o.stats.ram.used_bytes as f64),
            row("overflow, after the trim", Unit::Mib, false, |o| o.stats.overflow.used_bytes as f64),
        ],
        vec![
            row("VM's own count: reads", Unit::Count, true, |o| o.last().map_or(0.0, |s| s.io.reads as f64)),
            row("writes", Unit::Count, true, |o| o.last().map_or(0.0, |s| s.io.writes as f64)),
        ],
    ]
}

/// The whole table.
pub fn table(outcomes: &[Outcome]) -> Table {
    let mut table = Table::new();
    table.load_preset(presets::ASCII_MARKDOWN);
    let mut header = vec![String::new()];
    for (i, o) in outcomes.iter().enumerate() {
        header.push(o.name.to_string());
        if i > 0 {
            header.push("of baseline".into());
        }
    }
    let columns = header.len();
    table.set_header(header);
    for (i, block) in rows().into_iter().enumerate() {
        if i > 0 {
            table.add_row(vec![String::new(); columns]);
        }
        for (j, r) in block.into_iter().enumerate() {
            let base = outcomes.first().map_or(0.0, |o| (r.figure)(o));
            let mut cells = vec![if j == 0 { r.name.clone() } else { format!("    {}", r.name) }];
            for (k, o) in outcomes.iter().enumerate() {
                let figure = (r.figure)(o);
                cells.push(r.unit.show(figure));
                if k > 0 {
                    cells.push(if r.share && base > 0.0 {
                        format!("{:.0}%", figure / base * 100.0)
                    } else {
                        String::new()
                    });
                }
            }
            table.add_row(cells);
        }
    }
    for column in 1..columns {
        if let Some(c) = table.column_mut(column) {
            c.set_cell_alignment(CellAlignment::Right);
        }
    }
    table
}

/// The last line: what the guest wrote that no disk had to take.
pub fn last_line(outcomes: &[Outcome]) -> String {
    let parts: Vec<String> = outcomes
        .iter()
        .skip(1)
        .map(|o| {
            let wrote = o.stats.planes.guest.written_bytes;
            let spared = wrote.saturating_sub(storage(o).1);
            format!(
                "{} of {} bytes written ({:.1}%) with {}",
                group(spared),
                group(wrote),
                spared as f64 / (wrote.max(1)) as f64 * 100.0,
                o.name
            )
        })
        .collect();
    format!("Never reached the disk: {}.", parts.join("; "))
}

#[cfg(test)]
mod tests {
    #[test]
    fn digits_are_grouped_by_three() {
        assert_eq!([0, 999, 1000, 1_234_567].map(super::group), ["0", "999", "1,000", "1,234,567"]);
    }
}

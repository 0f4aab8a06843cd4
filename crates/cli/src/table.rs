//! The figures of a disk as a table for people. Only arranges; every figure comes from [`Stats`].
//!
//! Invariant: a share is of what the guest moved, in bytes, so that all lines can be compared.

use spillway_control::counters::{Counter, Unit, group, shown};
use spillway_control::{Latency, Plane, Stats, bytes};
use std::fmt::Write;
use std::time::Duration;

/// What is told in a line of its own, under the name of its first counter: whether it is shown if all is 0, and what stands beside
/// it.
const LINES: [(bool, &Counter, &[&Counter]); 7] = [
    (true, shown("map.bytes"), &[]),
    (true, shown("inflight"), &[shown("waiting")]),
    (
        false,
        shown("chunks.asked"),
        &[
            shown("chunks.missing"),
            shown("chunks.stalls"),
            shown("chunks.found"),
            shown("chunks.found_bytes"),
        ],
    ),
    (
        false,
        shown("evictions.blocks"),
        &[
            shown("evictions.background"),
            shown("evictions.urgent"),
            shown("promotions.blocks"),
            shown("collector.moved_blocks"),
        ],
    ),
    (false, shown("throttled.count"), &[shown("throttled.ns")]),
    (false, shown("stalls.count"), &[shown("stalls.ns")]),
    (true, shown("discards.count"), &[shown("discards.bytes"), shown("flushes")]),
];

/// What should be 0.
const TROUBLES: [&Counter; 6] = [
    shown("failed.requests"),
    shown("checksum_mismatches"),
    shown("overflow.write_errors"),
    shown("overflow.read_errors"),
    shown("degraded"),
    shown("restarts"),
];

/// The columns of planes; their share stands behind them.
const PLANE_COLUMNS: [&Counter; 4] = [
    shown("planes.guest.reads"),
    shown("planes.guest.writes"),
    shown("planes.guest.read_bytes"),
    shown("planes.guest.written_bytes"),
];

/// The planes in the order of the table, under their names for people.
fn planes(stats: &Stats) -> [(&'static str, Plane); 6] {
    let base = &stats.planes.base;
    [
        ("guest", stats.planes.guest.clone()),
        ("RAM tier", stats.planes.ram.clone()),
        (own_file(&stats.mode), stats.planes.overflow.clone()),
        ("base image", plane(base.reads, base.writes, base.read_bytes, base.written_bytes)),
        ("  its store", plane(base.store_reads, 0, base.store_read_bytes, 0)),
        ("no storage", stats.planes.zero.clone()),
    ]
}

/// What the plane `overflow` is in a mode, in a word of at most ten letters.
fn own_file(mode: &str) -> &'static str {
    match mode {
        "direct" => "difference",
        "persistent" | "ephemeral" => "disk",
        _ => "overflow",
    }
}

fn plane(reads: u64, writes: u64, read_bytes: u64, written_bytes: u64) -> Plane {
    Plane { reads, writes, read_bytes, written_bytes }
}

/// Everything at one moment.
pub fn summary(stats: &Stats) -> String {
    let mut out = format!(
        "disk of {}, mode {}, generation {}, {}\n\n",
        bytes(stats.size_bytes),
        stats.mode,
        stats.generation,
        count(stats.clients, "client")
    );
    out.push_str(&by_plane(stats));
    out.push('\n');
    out.push_str(&gauges(stats));
    out.push('\n');
    out.push_str(&latencies(stats));
    out
}

/// Where the I/O went.
pub fn by_plane(stats: &Stats) -> String {
    let mut out = plane_header("");
    let planes = planes(stats);
    let guest = planes[0].1.read_bytes.saturating_add(planes[0].1.written_bytes);
    for (name, p) in planes {
        let share = percent(p.read_bytes.saturating_add(p.written_bytes), guest);
        let cells = [group(p.reads), group(p.writes), bytes(p.read_bytes), bytes(p.written_bytes), share];
        out.push_str(&row(name, cells));
    }
    out
}

/// What happened by the second between two moments.
pub fn rates(before: &Stats, now: &Stats, passed: Duration) -> String {
    let seconds = passed.as_secs_f64().max(0.001);
    let per_second = |now: u64, before: u64| (now.saturating_sub(before) as f64 / seconds).round() as u64;
    let mut out = plane_header("per second");
    let pairs = planes(before).into_iter().zip(planes(now));
    let guest = pairs.clone().next().map_or(0, |((_, b), (_, n))| {
        n.read_bytes.wrapping_add(n.written_bytes).saturating_sub(b.read_bytes.wrapping_add(b.written_bytes))
    });
    for ((name, b), (_, n)) in pairs {
        let moved = n
            .read_bytes
            .wrapping_add(n.written_bytes)
            .saturating_sub(b.read_bytes.wrapping_add(b.written_bytes));
        let cells = [
            group(per_second(n.reads, b.reads)),
            group(per_second(n.writes, b.writes)),
            bytes(per_second(n.read_bytes, b.read_bytes)),
            bytes(per_second(n.written_bytes, b.written_bytes)),
            percent(moved, guest),
        ];
        out.push_str(&row(name, cells));
    }
    out
}

/// Levels and events.
pub fn gauges(stats: &Stats) -> String {
    let mut out = String::new();
    let mut line = |name: &str, text: String| {
        let _ = writeln!(out, "{name:<12} {text}");
    };
    let of = |used: &Counter, limit: u64| match limit {
        0 => used.text(stats),
        _ => format!("{} of {} ({})", used.text(stats), bytes(limit), percent((used.value)(stats), limit)),
    };
    // Each under its name in the table of counters.
    let named = |counters: &[&Counter]| -> String {
        let named = counters.iter().map(|counter| format!("{} {}", counter.short, counter.text(stats)));
        named.collect::<Vec<_>>().join(", ")
    };
    if stats.ram.limit_bytes > 0 {
        let used = const { shown("ram.used_bytes") };
        let peak = named(&[const { shown("ram.peak_bytes") }]);
        line(used.short, format!("{}, {peak}", of(used, stats.ram.limit_bytes)));
    }
    if stats.mode != "ram" {
        let used = of(const { shown("overflow.used_bytes") }, stats.overflow.limit_bytes);
        let file = named(&[const { shown("overflow.file_bytes") }]);
        line(own_file(&stats.mode), format!("{used}, {file}"));
    }
    for (is_shown_if_zero, first, rest) in LINES {
        let mut all = rest.iter().chain([&first]);
        if is_shown_if_zero || all.any(|counter| (counter.value)(stats) > 0) {
            let texts = [first.text(stats), named(rest)];
            line(
                first.short,
                texts.into_iter().filter(|text| !text.is_empty()).collect::<Vec<_>>().join(", "),
            );
        }
    }
    if !stats.engine.is_empty() {
        let confined = match stats.landlock {
            0 => "no Landlock".into(),
            version => format!("Landlock {version}"),
        };
        line("worker", format!("I/O by {}, {confined}", stats.engine));
    }
    let troubles: Vec<&Counter> =
        TROUBLES.iter().copied().filter(|counter| (counter.value)(stats) > 0).collect();
    if !troubles.is_empty() {
        line("trouble", named(&troubles));
    }
    out
}

fn latencies(stats: &Stats) -> String {
    let l = &stats.latency;
    let mut out = format!("{:<15}{:>12}{:>12}{:>12}\n", "latency", "p50", "p99", "max");
    for (name, Latency { p50_ns, p99_ns, max_ns, count, .. }) in [
        ("guest read", &l.read),
        ("guest write", &l.write),
        ("overflow read", &l.overflow_read),
        ("overflow write", &l.overflow_write),
        ("base read", &l.base_read),
        ("chunk", &l.chunk),
    ] {
        if *count > 0 {
            let [p50, p99, max] = [p50_ns, p99_ns, max_ns].map(|ns| Unit::Nanoseconds.text(*ns));
            let _ = writeln!(out, "{name:<15}{p50:>12}{p99:>12}{max:>12}");
        }
    }
    out
}

fn plane_header(name: &str) -> String {
    let [reads, writes, read, written] = PLANE_COLUMNS.map(|counter| counter.short.to_owned());
    row(name, [reads, writes, read, written, "share".to_owned()])
}

fn row(name: &str, cells: [String; 5]) -> String {
    let [reads, writes, read, written, share] = cells;
    format!("{name:<12}{reads:>14}{writes:>14}{read:>13}{written:>13}{share:>9}\n")
}

/// `3 clients`, `1 client`.
fn count(n: u64, what: &str) -> String {
    format!("{} {what}{}", group(n), if n == 1 { "" } else { "s" })
}

/// `12.5%`; a dash where there is nothing to compare with.
pub fn percent(part: u64, whole: u64) -> String {
    match whole {
        0 => "-".into(),
        _ => format!("{:.1}%", part as f64 * 100.0 / whole as f64),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stats() -> Stats {
        let mut s = Stats {
            mode: "ram+overflow".into(),
            size_bytes: 10 << 30,
            generation: 1,
            clients: 1,
            ..Stats::default()
        };
        s.planes.guest = plane(1_234_567, 2000, 3 << 30, 1 << 30);
        s.planes.ram = plane(1_000_000, 2000, 1 << 30, 1 << 30);
        s.planes.base.store_reads = 7;
        s.ram.limit_bytes = 256 << 20;
        s.ram.used_bytes = 64 << 20;
        s.latency.read = Latency { p50_ns: 900, p99_ns: 12_345, max_ns: 2_000_000, count: 5, sum_ns: 1 };
        s
    }

    #[test]
    fn the_table_says_where_it_went() {
        let text = summary(&stats());
        let line = |name: &str| {
            text.lines().find(|l| l.starts_with(name)).unwrap_or_else(|| panic!("{name}:\n{text}"))
        };
        assert!(line("guest ").contains("1,234,567") && line("guest ").contains("100.0%"), "{text}");
        assert!(line("RAM tier ").contains("50.0%"), "{text}");
        assert!(text.contains("64.0 MiB of 256.0 MiB (25.0%)"), "{text}");
        assert!(line("guest read").contains("12.3 us") && line("guest read").contains("2.0 ms"), "{text}");
        assert!(!text.contains("trouble") && !text.contains("Landlock"), "{text}");
        let of = |landlock| summary(&Stats { engine: "threads".into(), landlock, ..stats() });
        assert!(of(0).contains("I/O by threads, no Landlock\n"), "{}", of(0));
        assert!(of(7).contains("I/O by threads, Landlock 7\n"), "{}", of(7));
    }

    /// The names and units are those of the table of counters.
    #[test]
    fn what_has_happened_is_told_by_the_counters_names() {
        let mut s = stats();
        s.evictions.blocks = 1234;
        s.evictions.urgent = 2;
        s.promotions.blocks = 1;
        s.stalls.count = 3;
        s.stalls.ns = 1_500_000;
        s.discards.bytes = 1 << 20;
        s.failed.requests = 7;
        s.degraded = 1;
        s.chunks.found = 40;
        s.chunks.found_bytes = 40 << 20;
        let text = gauges(&s);
        for line in [
            "evicted      1,234 blocks, background writes 0, urgent writes 2, promoted 1 block, moved by collector 0 blocks\n",
            "stalls       3, time waited 1.5 ms\n",
            "in flight    0, waiting for space 0\n",
            "chunks asked 0, missing 0, stalls 0, chunks found 40, bytes found 40.0 MiB\n",
            "discards     0, given back 1.0 MiB, flushes 0\n",
            "trouble      failed requests 7, degraded 1\n",
            ", peak 0 B\n",
            ", file 0 B\n",
        ] {
            assert!(text.contains(line), "{line} is not in:\n{text}");
        }
        assert!(!text.contains("rate limited"), "{text}");
    }

    #[test]
    fn rates_are_of_the_time_between() {
        let before = stats();
        let mut now = before.clone();
        now.planes.guest.reads += 500;
        now.planes.guest.read_bytes += 2 << 20;
        let text = rates(&before, &now, Duration::from_millis(500));
        let guest = text.lines().nth(1).unwrap();
        assert!(guest.contains("1,000") && guest.contains("4.0 MiB"), "{text}");
    }

    #[test]
    fn a_disk_at_rest_shows_no_division_by_zero() {
        let text = summary(&Stats::default());
        assert!(text.contains('-') && !text.contains("NaN"), "{text}");
    }
}

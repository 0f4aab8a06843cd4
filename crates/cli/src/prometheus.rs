//! The figures of one disk as Prometheus text, the disk's serial number on every sample.
//!
//! Invariant: each family has HELP and TYPE once, directly above its samples, and every sample is a number.

use spillway_api::exposition::{Exposition, seconds};
use spillway_api::{CURVE_LIMITS, CurveFigures, DiskCurve};
use spillway_control::{Latency, Plane, Stats};
use std::fmt::Display;

struct Text<'a> {
    out: Exposition,
    /// The disk that every sample names.
    disk: &'a str,
}

impl Text<'_> {
    fn family(&mut self, name: &str, kind: &str, help: &str) {
        self.out.family(name, kind, help);
    }

    fn sample(&mut self, name: &str, labels: &[(&str, &str)], value: impl Display) {
        self.out.sample(name, [("disk", self.disk)].iter().chain(labels).copied(), value);
    }

    fn one(&mut self, name: &str, kind: &str, help: &str, value: impl Display) {
        self.family(name, kind, help);
        self.sample(name, &[], value);
    }

    /// One family with a sample for each value of a label.
    fn by(&mut self, label: &str, name: &str, help: &str, of: &[(&str, u64)]) {
        self.family(name, "counter", help);
        for (value, figure) in of {
            self.sample(name, &[(label, value)], figure);
        }
    }

    /// One family with a sample for each plane.
    fn planes(&mut self, name: &str, help: &str, stats: &Stats, of: impl Fn(&Plane) -> u64) {
        let (p, b) = (&stats.planes, &stats.planes.base);
        let base = Plane {
            reads: b.reads,
            writes: b.writes,
            read_bytes: b.read_bytes,
            written_bytes: b.written_bytes,
        };
        let planes = [
            ("guest", &p.guest),
            ("ram", &p.ram),
            ("overflow", &p.overflow),
            ("base", &base),
            ("zero", &p.zero),
        ];
        self.by("plane", name, help, &planes.map(|(plane, figures)| (plane, of(figures))));
    }

    /// A summary and the maximum beside it.
    fn durations(&mut self, name: &str, label: &str, help: &str, of: &[(&str, &Latency)]) {
        let summary = format!("{name}_seconds");
        self.family(&summary, "summary", help);
        for (value, l) in of {
            for (quantile, ns) in [("0.5", l.p50_ns), ("0.99", l.p99_ns)] {
                self.sample(&summary, &[(label, value), ("quantile", quantile)], seconds(ns));
            }
            self.sample(&format!("{summary}_sum"), &[(label, value)], seconds(l.sum_ns));
            self.sample(&format!("{summary}_count"), &[(label, value)], l.count);
        }
        let max = format!("{name}_max_seconds");
        self.family(&max, "gauge", "The slowest of those.");
        for (value, l) in of {
            self.sample(&max, &[(label, value)], seconds(l.max_ns));
        }
    }
}

/// All figures of one disk.
pub fn text(stats: &Stats) -> String {
    let s = stats;
    let mut t = Text { out: Exposition::default(), disk: &s.serial };
    t.family("disk_info", "gauge", "What the disk is; always 1.");
    t.sample("disk_info", &[("mode", &s.mode), ("full", &s.full)], 1);
    t.planes("reads_total", "Read operations by plane.", s, |p| p.reads);
    t.planes("writes_total", "Write operations by plane.", s, |p| p.writes);
    t.planes("read_bytes_total", "Bytes read by plane.", s, |p| p.read_bytes);
    t.planes("written_bytes_total", "Bytes written by plane.", s, |p| p.written_bytes);
    let e = &s.evictions;
    let kinds = [("background", e.background), ("urgent", e.urgent)];
    t.by("kind", "evictions_total", "Eviction writes; urgent: while a guest write waited.", &kinds);
    let from = [("base", s.merges.base_bytes), ("overflow", s.merges.overflow_bytes)];
    t.by("from", "merge_read_bytes_total", "Bytes read to complete blocks that were written in part.", &from);
    for (name, help, value) in [
        ("disk_size_bytes", "Size that the guest sees.", s.size_bytes),
        ("disk_base_bytes", "Size of the base image.", s.base_bytes),
        ("disk_generation", "1 at birth, one more after each reset.", s.generation),
        ("clients", "Connections to the exports.", s.clients),
        ("ram_used_bytes", "RAM tier in use.", s.ram.used_bytes),
        ("ram_limit_bytes", "Limit of the RAM tier.", s.ram.limit_bytes),
        ("ram_peak_bytes", "Most of the RAM tier that was ever in use.", s.ram.peak_bytes),
        ("ram_huge_bytes", "Memory of the RAM tier that is mapped by huge pages.", s.ram.huge_bytes),
        ("overflow_used_bytes", "Live bytes in the overflow file.", s.overflow.used_bytes),
        ("overflow_file_bytes", "Bytes that the overflow file holds.", s.overflow.file_bytes),
        ("overflow_limit_bytes", "Limit of the overflow file; 0 for none.", s.overflow.limit_bytes),
        ("fill_level", "How full the write cache is: 0 normal, 1 warning, 2 critical.", s.level),
        ("full", "1 while the write cache is full: writes that need room wait or fail.", s.is_full),
        ("degraded", "1 while overflow writes fail again and again.", s.degraded),
        ("map_bytes", "Memory of the block map.", s.map.bytes),
        ("landlock_version", "Landlock that confines the worker; 0 for none.", s.landlock.into()),
        ("requests_inflight", "Unfinished requests.", s.inflight),
        ("requests_waiting", "Unfinished requests that wait for room.", s.waiting),
    ] {
        t.one(name, "gauge", help, value);
    }
    let (base, o) = (&s.planes.base, &s.overflow);
    for (name, help, value) in [
        ("base_store_reads_total", "Base reads past the host's page cache.", base.store_reads),
        ("base_store_read_bytes_total", "Bytes of those.", base.store_read_bytes),
        ("overflow_guest_bytes_total", "Guest bytes written straight to the file.", o.guest_bytes),
        ("overflow_guest_blocks_total", "Blocks written for those.", o.guest_blocks),
        ("overflow_summaries_total", "Blocks in which segments list what they hold.", o.summaries),
        ("overflow_lost_blocks_total", "Blocks written to the overflow in vain.", o.lost_blocks),
        ("overflow_segments_punched_total", "Segments given back to the file system.", o.segments_punched),
        ("overflow_write_errors_total", "Overflow writes that failed.", o.write_errors),
        ("overflow_read_errors_total", "Overflow reads that failed.", o.read_errors),
        ("evicted_blocks_total", "Blocks moved from RAM tier to overflow.", e.blocks),
        ("promoted_blocks_total", "Blocks moved from overflow to RAM tier.", s.promotions.blocks),
        ("collector_moved_blocks_total", "Blocks moved within the overflow.", s.collector.moved_blocks),
        ("collector_read_bytes_total", "Bytes read to move blocks.", s.collector.read_bytes),
        ("discards_total", "Discard requests completed.", s.discards.count),
        ("discarded_bytes_total", "Bytes of RAM and overflow given back.", s.discards.bytes),
        ("write_zeroes_total", "Write-zeroes requests completed.", s.write_zeroes),
        ("flushes_total", "Flushes completed.", s.flushes),
        ("stalls_total", "Writes that waited for room.", s.stalls.count),
        ("throttled_total", "Times that requests waited for the rate limit.", s.throttled.count),
        ("failed_requests_total", "Requests that ended with an error.", s.failed.requests),
        ("failed_read_bytes_total", "Bytes that those had read.", s.failed.read_bytes),
        ("failed_written_bytes_total", "Bytes that those had written.", s.failed.written_bytes),
        ("resets_total", "Resets.", s.resets),
        ("worker_restarts_total", "Workers attached after the first.", s.restarts),
        ("checksum_mismatches_total", "Blocks read back that did not match.", s.checksum_mismatches),
    ] {
        t.one(name, "counter", help, value);
    }
    t.one("stall_seconds_total", "counter", "How long writes waited for room.", seconds(s.stalls.ns));
    let throttled = seconds(s.throttled.ns);
    t.one("throttled_seconds_total", "counter", "How long requests waited for the rate limit.", throttled);
    let l = &s.latency;
    let guest = [("read", &l.read), ("write", &l.write)];
    t.durations("request_duration", "operation", "Guest requests.", &guest);
    let host = [
        ("overflow_read", &l.overflow_read),
        ("overflow_write", &l.overflow_write),
        ("base_read", &l.base_read),
    ];
    t.durations("host_io_duration", "io", "The host's own I/O.", &host);
    t.out.text()
}

/// What sizes of the RAM tier would have done, of one disk.
pub fn curve(serial: &str, curve: &DiskCurve) -> String {
    let mut t = Text { out: Exposition::default(), disk: serial };
    let figures = CurveFigures::from(curve);
    let name = "curve_overflow_written_bytes_total";
    t.family(name, "counter", "What a RAM tier of this size would have evicted, by LRU on a sample.");
    for (limit, bytes) in CURVE_LIMITS.iter().zip(figures.overflow_write_bytes) {
        t.sample(name, &[("ram_bytes", &limit.to_string())], bytes);
    }
    let help = "What the guest wrote meanwhile, zeroes left out.";
    t.one("curve_written_bytes_total", "counter", help, figures.written_bytes);
    let help = "The RAM tier at which nothing would have been evicted.";
    t.one("curve_zero_overflow_bytes", "gauge", help, figures.zero_overflow_bytes);
    let help = "The one that would have absorbed 95% of it.";
    t.one("curve_recommended_bytes", "gauge", help, figures.recommended_bytes);
    t.out.text()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn every_sample_follows_its_family_and_the_naming_rules() {
        let mut stats = Stats { mode: "ram+overflow".into(), full: "pause".into(), ..Stats::default() };
        stats.latency.read.p50_ns = 1500;
        let text = text(&stats);
        let (mut families, mut samples) = (HashSet::new(), HashSet::new());
        let (mut family, mut kind) = (String::new(), String::new());
        for line in text.lines() {
            if let Some(help) = line.strip_prefix("# HELP ") {
                family = help.split(' ').next().unwrap().to_owned();
                assert!(families.insert(family.clone()), "{family} twice");
            } else if let Some(of) = line.strip_prefix("# TYPE ") {
                let (name, of) = of.split_once(' ').unwrap();
                assert_eq!(name, family);
                kind = of.to_owned();
                assert_eq!(kind == "counter", name.ends_with("_total"), "{name}");
            } else {
                let (sample, value) = line.rsplit_once(' ').unwrap();
                let name = sample.split('{').next().unwrap();
                let stem = name.strip_suffix("_sum").or(name.strip_suffix("_count")).unwrap_or(name);
                assert_eq!(if kind == "summary" { stem } else { name }, family, "{line}");
                assert!(value.parse::<f64>().unwrap().is_finite(), "{line}");
                assert!(samples.insert(sample.to_owned()), "{sample} twice");
            }
        }
        assert!(families.len() > 30);
        assert!(text.contains("operation=\"read\",quantile=\"0.5\"} 0.0000015"), "{text}");
    }

    #[test]
    fn two_disks_are_told_apart_whatever_they_are_called() {
        let named = |serial: &str| text(&Stats { serial: serial.into(), ..Stats::default() });
        let samples = |text: &str| -> HashSet<String> {
            let lines = text.lines().filter(|l| !l.starts_with('#'));
            lines.map(|l| l.rsplit_once(' ').unwrap().0.to_owned()).collect()
        };
        let (one, two) = (samples(&named("spillway-1")), samples(&named("spillway-2")));
        assert!(one.is_disjoint(&two) && one.len() == two.len());
        assert!(one.contains("spillway_ram_used_bytes{disk=\"spillway-1\"}"), "{one:?}");
        let odd = named("a\"b\\c\nd");
        assert!(odd.contains(r#"spillway_clients{disk="a\"b\\c\nd"} 0"#), "{odd}");
    }

    /// Gives each number its own value.
    fn number(value: &mut serde_json::Value, at: &str, next: &mut u64, all: &mut Vec<(String, u64)>) {
        match value {
            serde_json::Value::Object(map) => {
                map.iter_mut().for_each(|(key, v)| number(v, &format!("{at}.{key}"), next, all))
            }
            serde_json::Value::Number(_) => {
                *next += 1;
                *value = (*next).into();
                all.push((at.to_owned(), *next));
            }
            _ => {}
        }
    }

    #[test]
    fn every_figure_of_the_json_is_there() {
        let mut json = serde_json::to_value(Stats::default()).unwrap();
        let (mut next, mut all) = (1_000_000_000, Vec::new());
        number(&mut json, "", &mut next, &mut all);
        let text = text(&serde_json::from_value(json).unwrap());
        let values: HashSet<&str> = text.lines().filter_map(|l| Some(l.rsplit_once(' ')?.1)).collect();
        for (key, value) in all.iter().filter(|(key, _)| key != ".schema" && key != ".worker_pid") {
            let ns = key.ends_with("ns");
            let shown = if ns { seconds(*value).to_string() } else { value.to_string() };
            assert!(values.contains(shown.as_str()), "{key} is missing: {text}");
        }
        assert!(all.len() > 60);
    }
}

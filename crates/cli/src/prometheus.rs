//! The figures as Prometheus text (exposition format 0.0.4): base units, `_total` for what only grows.
//!
//! Invariant: each family has HELP and TYPE once, directly above its samples, and every sample is a number.

use spillway_worker::supervisor::{Latency, Plane, Stats};
use std::fmt::{Display, Write};

struct Text(String);

impl Text {
    fn family(&mut self, name: &str, kind: &str, help: &str) {
        let _ = writeln!(self.0, "# HELP spillway_{name} {help}\n# TYPE spillway_{name} {kind}");
    }

    /// One sample. `labels` come with their braces, or empty.
    fn sample(&mut self, name: &str, labels: &str, value: impl Display) {
        let _ = writeln!(self.0, "spillway_{name}{labels} {value}");
    }

    fn one(&mut self, name: &str, kind: &str, help: &str, value: impl Display) {
        self.family(name, kind, help);
        self.sample(name, "", value);
    }

    /// One family with a sample for each plane.
    fn planes(&mut self, name: &str, help: &str, stats: &Stats, of: impl Fn(&Plane) -> u64) {
        let b = &stats.planes.base;
        let base = Plane {
            reads: b.reads,
            writes: b.writes,
            read_bytes: b.read_bytes,
            written_bytes: b.written_bytes,
        };
        self.family(name, "counter", help);
        for (plane, figures) in [
            ("guest", &stats.planes.guest),
            ("ram", &stats.planes.ram),
            ("overflow", &stats.planes.overflow),
            ("base", &base),
            ("zero", &stats.planes.zero),
        ] {
            self.sample(name, &format!("{{plane=\"{plane}\"}}"), of(figures));
        }
    }

    fn durations(&mut self, name: &str, label: &str, help: &str, of: &[(&str, &Latency)]) {
        self.family(name, "summary", help);
        for (value, l) in of {
            for (quantile, ns) in [("0.5", l.p50_ns), ("0.99", l.p99_ns)] {
                let labels = format!("{{{label}=\"{value}\",quantile=\"{quantile}\"}}");
                self.sample(name, &labels, seconds(ns));
            }
            let labels = format!("{{{label}=\"{value}\"}}");
            self.sample(&format!("{name}_sum"), &labels, seconds(l.sum_ns));
            self.sample(&format!("{name}_count"), &labels, l.count);
        }
    }
}

fn seconds(ns: u64) -> f64 {
    ns as f64 / 1e9
}

/// All figures of one disk.
pub fn text(stats: &Stats) -> String {
    let mut t = Text(String::new());
    t.family("disk_info", "gauge", "What the disk is; always 1.");
    t.sample("disk_info", &format!("{{mode=\"{}\",full=\"{}\"}}", stats.mode, stats.full), 1);
    for (name, kind, help, value) in [
        ("disk_size_bytes", "gauge", "Size that the guest sees.", stats.size_bytes),
        ("disk_generation", "gauge", "1 at birth, one more after each reset.", stats.generation),
        ("clients", "gauge", "Connections to the exports.", stats.clients),
    ] {
        t.one(name, kind, help, value);
    }
    t.planes("reads_total", "Read operations by plane.", stats, |p| p.reads);
    t.planes("writes_total", "Write operations by plane.", stats, |p| p.writes);
    t.planes("read_bytes_total", "Bytes read by plane.", stats, |p| p.read_bytes);
    t.planes("written_bytes_total", "Bytes written by plane.", stats, |p| p.written_bytes);
    t.family("evictions_total", "counter", "Eviction writes; urgent: while a guest write waited.");
    t.sample("evictions_total", "{kind=\"background\"}", stats.evictions.background);
    t.sample("evictions_total", "{kind=\"urgent\"}", stats.evictions.urgent);
    let s = stats;
    for (name, kind, help, value) in [
        (
            "base_store_reads_total",
            "counter",
            "Base reads past the host's page cache.",
            s.planes.base.store_reads,
        ),
        ("base_store_read_bytes_total", "counter", "Bytes of those.", s.planes.base.store_read_bytes),
        ("ram_used_bytes", "gauge", "RAM tier in use.", s.ram.used_bytes),
        ("ram_limit_bytes", "gauge", "Limit of the RAM tier.", s.ram.limit_bytes),
        ("ram_peak_bytes", "gauge", "Most of the RAM tier that was ever in use.", s.ram.peak_bytes),
        ("overflow_used_bytes", "gauge", "Live bytes in the overflow file.", s.overflow.used_bytes),
        ("overflow_file_bytes", "gauge", "Bytes that the overflow file holds.", s.overflow.file_bytes),
        ("overflow_limit_bytes", "gauge", "Limit of the overflow file; 0 for none.", s.overflow.limit_bytes),
        ("overflow_write_errors_total", "counter", "Overflow writes that failed.", s.overflow.write_errors),
        ("map_bytes", "gauge", "Memory of the block map.", s.map.bytes),
        ("evicted_blocks_total", "counter", "Blocks moved from RAM tier to overflow.", s.evictions.blocks),
        (
            "collector_moved_blocks_total",
            "counter",
            "Blocks moved within the overflow.",
            s.collector.moved_blocks,
        ),
        ("discards_total", "counter", "Discard requests completed.", s.discards.count),
        ("discarded_bytes_total", "counter", "Bytes of RAM and overflow given back.", s.discards.bytes),
        ("write_zeroes_total", "counter", "Write-zeroes requests completed.", s.write_zeroes),
        ("flushes_total", "counter", "Flushes completed.", s.flushes),
        ("stalls_total", "counter", "Writes that waited for room.", s.stalls.count),
        ("failed_requests_total", "counter", "Requests that ended with an error.", s.failed.requests),
        ("requests_inflight", "gauge", "Unfinished requests.", s.inflight),
        ("requests_waiting", "gauge", "Unfinished requests that wait for room.", s.waiting),
        ("resets_total", "counter", "Resets.", s.resets),
        ("worker_restarts_total", "counter", "Workers attached after the first.", s.restarts),
        (
            "checksum_mismatches_total",
            "counter",
            "Blocks read back that did not match.",
            s.checksum_mismatches,
        ),
    ] {
        t.one(name, kind, help, value);
    }
    t.one("stall_seconds_total", "counter", "How long writes waited for room.", seconds(s.stalls.ns));
    let guest = [("read", &s.latency.read), ("write", &s.latency.write)];
    let host = [
        ("overflow_read", &s.latency.overflow_read),
        ("overflow_write", &s.latency.overflow_write),
        ("base_read", &s.latency.base_read),
    ];
    t.durations("request_duration_seconds", "operation", "Guest requests.", &guest);
    t.durations("host_io_duration_seconds", "io", "The host's own I/O.", &host);
    t.family("request_duration_max_seconds", "gauge", "The slowest guest request.");
    for (operation, latency) in guest {
        let labels = format!("{{operation=\"{operation}\"}}");
        t.sample("request_duration_max_seconds", &labels, seconds(latency.max_ns));
    }
    t.0
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
}

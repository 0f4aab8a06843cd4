//! The figures of one disk as Prometheus text, the disk's serial number on every sample.
//!
//! Invariant: each family has HELP and TYPE once, directly above its samples, and every sample is a number.

use spillway_api::exposition::{Exposition, seconds};
use spillway_api::{CURVE_LIMITS, CurveFigures, DiskCurve};
use spillway_control::counters::{COUNTERS, Unit, of_metric};
use spillway_control::{Latency, Stats};
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
    for counter in COUNTERS {
        // Rows of one metric stand together.
        if of_metric(counter.metric).is_some_and(|first| first.key == counter.key) {
            t.family(counter.metric, counter.kind.name(), counter.help);
        }
        let value = (counter.value)(s);
        match counter.unit {
            Unit::Nanoseconds => t.sample(counter.metric, counter.label.as_slice(), seconds(value)),
            _ => t.sample(counter.metric, counter.label.as_slice(), value),
        }
    }
    let l = &s.latency;
    let guest = [("read", &l.read), ("write", &l.write)];
    t.durations("request_duration", "operation", "Guest requests.", &guest);
    let host = [
        ("overflow_read", &l.overflow_read),
        ("overflow_write", &l.overflow_write),
        ("base_read", &l.base_read),
        ("chunk", &l.chunk),
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

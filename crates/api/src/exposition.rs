//! Prometheus text format (exposition format 0.0.4): base units, `_total` for counters. Owns the format, not the figures.
//!
//! Invariant: the value of a label cannot end its quotes.

use std::fmt::{Display, Write};

/// Value of the header `Content-Type`.
pub const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Text under construction. Each name gets the prefix `spillway_`.
#[derive(Debug, Default)]
pub struct Exposition(String);

impl Exposition {
    /// Begins a family of metrics. Its samples follow directly.
    pub fn family(&mut self, name: &str, kind: &str, help: &str) {
        let _ = writeln!(self.0, "# HELP spillway_{name} {help}\n# TYPE spillway_{name} {kind}");
    }

    /// Writes one sample of the current metric.
    pub fn sample<'a>(
        &mut self,
        name: &str,
        labels: impl IntoIterator<Item = (&'a str, &'a str)>,
        value: impl Display,
    ) {
        let _ = write!(self.0, "spillway_{name}");
        let mut open = '{';
        for (label, value) in labels {
            let _ = write!(self.0, "{open}{label}=\"{}\"", escaped(value));
            open = ',';
        }
        let close = if open == ',' { "}" } else { "" };
        let _ = writeln!(self.0, "{close} {value}");
    }

    /// Returns the exposition text of all metrics.
    pub fn text(self) -> String {
        self.0
    }
}

/// Escapes the value of a label.
fn escaped(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

/// Converts nanoseconds to seconds, the unit of Prometheus.
pub fn seconds(ns: u64) -> f64 {
    ns as f64 / 1e9
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_follow_their_family_and_labels_stay_in_their_quotes() {
        let mut text = Exposition::default();
        text.family("x_total", "counter", "What.");
        text.sample("x_total", [], 1);
        text.sample("x_total", [("a", "1\"\\\n"), ("b", "2")], seconds(1500));
        let want = "# HELP spillway_x_total What.\n# TYPE spillway_x_total counter\nspillway_x_total 1\n\
            spillway_x_total{a=\"1\\\"\\\\\\n\",b=\"2\"} 0.0000015\n";
        assert_eq!(text.text(), want);
    }
}

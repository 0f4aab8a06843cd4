//! The model of a far store: how long it takes, how much it carries, and which faults it has. Owns how a model is written down, as
//! parts (`latency=30ms,bandwidth=100M`, as storage models of disks are) and as JSON.
//!
//! Invariant: a model that was parsed or checked has chances from 0 to 1 whose sum is at most 1, and a 99th percentile that is not
//! below the median.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// A fault of a store, as a client sees it. Its name in models and figures is in kebab case, such as `status-503`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum StoreFault {
    /// The answer is 403, and the store is not asked.
    #[serde(rename = "status-403")]
    Status403,
    /// The answer is 404, and the store is not asked.
    #[serde(rename = "status-404")]
    Status404,
    /// The answer is 429, and the store is not asked.
    #[serde(rename = "status-429")]
    Status429,
    /// The answer is 500, and the store is not asked.
    #[serde(rename = "status-500")]
    Status500,
    /// The answer is 503, and the store is not asked.
    #[serde(rename = "status-503")]
    Status503,
    /// The connection is closed after a random part of the body.
    CutBody,
    /// One random bit of the body is wrong.
    FlippedBit,
    /// The body is that of another object.
    OtherObject,
    /// The body makes no progress after a random part of it.
    StalledBody,
    /// The connection is reset before an answer. The store may have carried out the request.
    Reset,
}

impl StoreFault {
    /// All of them.
    pub const ALL: [StoreFault; 10] = [
        StoreFault::Status403,
        StoreFault::Status404,
        StoreFault::Status429,
        StoreFault::Status500,
        StoreFault::Status503,
        StoreFault::CutBody,
        StoreFault::FlippedBit,
        StoreFault::OtherObject,
        StoreFault::StalledBody,
        StoreFault::Reset,
    ];

    /// Its name in models and figures.
    pub fn name(self) -> &'static str {
        match self {
            StoreFault::Status403 => "status-403",
            StoreFault::Status404 => "status-404",
            StoreFault::Status429 => "status-429",
            StoreFault::Status500 => "status-500",
            StoreFault::Status503 => "status-503",
            StoreFault::CutBody => "cut-body",
            StoreFault::FlippedBit => "flipped-bit",
            StoreFault::OtherObject => "other-object",
            StoreFault::StalledBody => "stalled-body",
            StoreFault::Reset => "reset",
        }
    }

    /// The status that is answered in place of the store's.
    pub(super) fn status(self) -> Option<u16> {
        match self {
            StoreFault::Status403 => Some(403),
            StoreFault::Status404 => Some(404),
            StoreFault::Status429 => Some(429),
            StoreFault::Status500 => Some(500),
            StoreFault::Status503 => Some(503),
            _ => None,
        }
    }

    /// Whether only the body of an answer can have it.
    pub(super) fn is_of_body(self) -> bool {
        self.status().is_none() && self != StoreFault::Reset
    }
}

/// How a store is away.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Away {
    /// Requests are received and not answered until the store is back.
    Silent,
    /// Connections are reset, and new ones refused.
    Refuses,
}

/// What a far store does. The default has no limit and no fault. Times of 0 and limits of 0 are none.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct StoreModel {
    /// Median time from a request to the first byte of its answer, in nanoseconds. What the store itself takes is a part of it.
    pub latency_ns: u64,
    /// 99th percentile of that time, in nanoseconds; 0: every request takes the median. Times are log-normal.
    pub latency_p99_ns: u64,
    /// Bytes of bodies a second, for all connections together, in each direction.
    pub bandwidth_bytes: u64,
    /// Chance of each fault, from 0 to 1. A request has one fault at most.
    pub faults: BTreeMap<StoreFault, f64>,
    /// These faults come first: one for each request, in this order.
    pub next: Vec<StoreFault>,
    /// Only requests whose path has this text have faults; empty: all.
    pub at: String,
    /// Time for which a stalled body makes no progress, in nanoseconds; 0: for ever.
    pub stall_ns: u64,
    /// The store is away.
    pub away: Option<Away>,
}

impl StoreModel {
    /// Reads a model: parts such as `latency=30ms,cut-body=0.01`, each at most once. An empty text is the default.
    ///
    /// # Errors
    /// What is wrong, in words.
    pub fn parse(text: &str) -> Result<StoreModel, String> {
        let mut model = StoreModel::default();
        let mut seen = Vec::new();
        for part in text.split(',').filter(|_| !text.is_empty()) {
            let (name, value) = part.split_once('=').ok_or_else(|| format!("'{part}' is not NAME=VALUE"))?;
            if seen.contains(&name) {
                return Err(format!("{name} is named twice"));
            }
            seen.push(name);
            let time = || time_ns(value).map_err(|e| format!("{name}: {e}"));
            match name {
                "latency" => model.latency_ns = time()?,
                "latency-p99" => model.latency_p99_ns = time()?,
                "bandwidth" => model.bandwidth_bytes = size(value).map_err(|e| format!("{name}: {e}"))?,
                "at" => value.clone_into(&mut model.at),
                "stall" => model.stall_ns = time()?,
                "away" => {
                    model.away = Some(match value {
                        "silent" => Away::Silent,
                        "refuses" => Away::Refuses,
                        _ => return Err("away is silent or refuses".into()),
                    });
                }
                _ => {
                    let fault = StoreFault::ALL.into_iter().find(|fault| fault.name() == name);
                    let fault = fault.ok_or_else(|| unknown(name))?;
                    let chance = value.parse().map_err(|_| format!("{name}: '{value}' is not a number"))?;
                    model.faults.insert(fault, chance);
                }
            }
        }
        model.check()?;
        Ok(model)
    }

    /// Refuses a model that no store can follow.
    ///
    /// # Errors
    /// What is wrong, in words.
    pub fn check(&self) -> Result<(), String> {
        for (fault, chance) in &self.faults {
            if !(0.0..=1.0).contains(chance) {
                return Err(format!("{}: a chance is a number from 0 to 1", fault.name()));
            }
        }
        // What sums of decimal fractions are off by.
        if self.faults.values().sum::<f64>() > 1.0 + 1e-9 {
            return Err(
                "the chances of all faults are more than 1 together: a request has one at most".into()
            );
        }
        if self.latency_p99_ns > 0 && self.latency_p99_ns < self.latency_ns {
            return Err("latency-p99 is below latency, which is the median".into());
        }
        if self.latency_p99_ns > 0 && self.latency_ns == 0 {
            return Err("latency-p99 needs latency, the median: name that too".into());
        }
        Ok(())
    }
}

fn unknown(name: &str) -> String {
    let faults = StoreFault::ALL.map(StoreFault::name).join(", ");
    format!(
        "there is no '{name}': it is latency, latency-p99, bandwidth, stall, at, away, or a fault: {faults}"
    )
}

fn time_ns(text: &str) -> Result<u64, String> {
    let units = [("us", 1_000), ("ms", 1_000_000), ("s", 1_000_000_000)];
    let found = units.iter().find_map(|(unit, ns)| Some((text.strip_suffix(unit)?, ns)));
    let ns = found.and_then(|(number, ns)| whole(number)?.checked_mul(*ns));
    ns.ok_or_else(|| "a time is a whole number and us, ms or s, such as 30ms".into())
}

fn size(text: &str) -> Result<u64, String> {
    let units = [("K", 10), ("M", 20), ("G", 30)];
    let found = units.iter().find_map(|(unit, shift)| Some((text.strip_suffix(unit)?, *shift)));
    let (number, shift) = found.unwrap_or((text, 0));
    let bytes = whole(number).and_then(|number| number.checked_mul(1 << shift));
    bytes.ok_or_else(|| "a size is a whole number with K, M or G, such as 100M".into())
}

fn whole(text: &str) -> Option<u64> {
    text.parse().ok().filter(|_| text.bytes().all(|b| b.is_ascii_digit()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_is_parts_that_go_together() {
        let text = "latency=30ms,latency-p99=300ms,bandwidth=100M,status-503=0.5,reset=0.25,stall=2s,at=/chunks/,away=silent";
        let expected = StoreModel {
            latency_ns: 30_000_000,
            latency_p99_ns: 300_000_000,
            bandwidth_bytes: 100 << 20,
            faults: [(StoreFault::Status503, 0.5), (StoreFault::Reset, 0.25)].into(),
            next: vec![],
            at: "/chunks/".into(),
            stall_ns: 2_000_000_000,
            away: Some(Away::Silent),
        };
        assert_eq!(StoreModel::parse(text), Ok(expected.clone()));
        let json = serde_json::to_string(&expected).unwrap();
        assert_eq!(serde_json::from_str::<StoreModel>(&json).unwrap(), expected);
        assert_eq!(StoreModel::parse(""), Ok(StoreModel::default()));
        for (bad, word) in [
            ("latency", "NAME=VALUE"),
            ("latency=5", "us, ms or s"),
            ("latency=+5ms", "us, ms or s"),
            ("bandwidth=1GB", "such as 100M"),
            ("cut-body=2", "from 0 to 1"),
            ("cut-body=NaN", "from 0 to 1"),
            ("cut-body=x", "not a number"),
            ("cut-body=0.7,reset=0.7", "more than 1 together"),
            ("latency=5ms,latency=6ms", "named twice"),
            ("latency=5ms,latency-p99=4ms", "the median"),
            ("latency-p99=4ms", "name that too"),
            ("away=yes", "silent or refuses"),
            ("rpm=7200", "flipped-bit"),
        ] {
            assert!(StoreModel::parse(bad).unwrap_err().contains(word), "{bad}");
        }
    }

    #[test]
    fn a_fault_has_one_name() {
        for fault in StoreFault::ALL {
            assert_eq!(serde_json::to_value(fault).unwrap(), fault.name());
        }
    }
}

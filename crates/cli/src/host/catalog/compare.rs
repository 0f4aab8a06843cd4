//! What differs between two sets of settings, one by one. Decides nothing.
//!
//! Invariant: settings that mean the same do not differ, whether they are said or usual.

use serde::Serialize;
use serde_json::Value;
use spillway_api::{CatalogSpec, Name, size_text};
use std::collections::{BTreeMap, BTreeSet};

/// Letters of a value that are shown.
const MOST_SHOWN: usize = 60;

/// A setting that is to be another.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Difference {
    /// Its name; what is below it after a dot.
    pub setting: String,
    /// What it is; null for nothing.
    pub now: Value,
    /// What it is to be.
    pub then: Value,
    /// Whether machines that run take it, or only those that start.
    pub live: bool,
}

impl Difference {
    /// `ram_bytes`, `256M -> 512M`, `at once`.
    pub fn row(&self) -> [String; 3] {
        let of = |value| value_text(&self.setting, value);
        let when = if self.live { "at once" } else { "at the next start" };
        [self.setting.clone(), format!("{} -> {}", of(&self.now), of(&self.then)), when.into()]
    }
}

/// All that differ, in the order of their names.
pub fn differences(catalog: &Name, now: &CatalogSpec, then: &CatalogSpec) -> Vec<Difference> {
    let (now, then) = (settings(&now.said(catalog)), settings(&then.said(catalog)));
    let names: BTreeSet<&String> = now.keys().chain(then.keys()).collect();
    let of = |settings: &BTreeMap<String, Value>, name: &str| settings.get(name).cloned().unwrap_or_default();
    let differ = names.into_iter().filter(|name| of(&now, name) != of(&then, name));
    let difference = |name: &String| {
        let top = name.split('.').next().unwrap_or(name);
        let live = CatalogSpec::is_live(top);
        Difference { setting: name.clone(), now: of(&now, name), then: of(&then, name), live }
    };
    differ.map(difference).collect()
}

/// The settings by their names; of labels and the like each by itself.
pub fn settings(spec: &CatalogSpec) -> BTreeMap<String, Value> {
    fn flatten(name: String, value: Value, into: &mut BTreeMap<String, Value>) {
        match value {
            Value::Object(fields) => {
                fields.into_iter().for_each(|(field, value)| flatten(format!("{name}.{field}"), value, into));
            }
            value => _ = into.insert(name, value),
        }
    }
    let mut flat = BTreeMap::new();
    match serde_json::to_value(spec) {
        Ok(Value::Object(fields)) => {
            fields.into_iter().for_each(|(name, value)| flatten(name, value, &mut flat))
        }
        other => unreachable!("settings are an object, not {other:?}"),
    }
    flat
}

/// A value for people: sizes in words, nothing long.
pub fn value_text(name: &str, value: &Value) -> String {
    let text = match value {
        Value::Null => "-".into(),
        Value::Number(number) if name.ends_with("_bytes") => {
            number.as_u64().map_or_else(|| number.to_string(), size_text)
        }
        Value::String(text) => text.escape_debug().to_string(),
        Value::Array(items) if items.is_empty() => "-".into(),
        other => other.to_string(),
    };
    match text.char_indices().nth(MOST_SHOWN) {
        Some((at, _)) => format!("{}...", &text[..at]),
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn differ(now: &str, then: &str) -> Vec<[String; 3]> {
        let spec =
            |settings: &str| serde_json::from_str(&format!(r#"{{"image": "debian"{settings}}}"#)).unwrap();
        let all = differences(&"desk".parse().unwrap(), &spec(now), &spec(then));
        all.iter().map(Difference::row).collect()
    }

    #[test]
    fn what_means_the_same_does_not_differ() {
        for (now, then) in [
            ("", r#", "mode": "ram+overflow", "ram_bytes": 268435456, "overflow_bytes": 10737418240"#),
            ("", r#", "naming": "desk-###", "reset": "power-cycle", "grace_seconds": 60, "labels": {}"#),
            (r#", "type": "dedicated""#, r#", "type": "dedicated", "mode": "persistent", "reset": "never""#),
        ] {
            assert_eq!(differ(now, then), [[""; 3]; 0], "{now} {then}");
        }
    }

    #[test]
    fn what_differs_is_said_one_by_one() {
        let rows = differ(
            r#", "count": 20, "labels": {"a": "1", "b": "2"}, "network": {"bridge": "br0"}"#,
            r#", "ram_bytes": 536870912, "count": 30, "labels": {"b": "2", "c": "3"}, "user_data": "a\nb""#,
        );
        let rows: Vec<[&str; 3]> = rows.iter().map(|row| row.each_ref().map(String::as_str)).collect();
        assert_eq!(
            rows,
            [
                ["count", "20 -> 30", "at once"],
                ["labels.a", "1 -> -", "at once"],
                ["labels.c", "- -> 3", "at once"],
                ["network", "- -> user", "at the next start"],
                ["network.bridge", "br0 -> -", "at the next start"],
                ["ram_bytes", "256M -> 512M", "at once"],
                ["user_data", r"- -> a\nb", "at the next start"],
            ]
        );
        let long = value_text("user_data", &"é".repeat(100).into());
        assert_eq!(long, format!("{}...", "é".repeat(60)));
    }
}

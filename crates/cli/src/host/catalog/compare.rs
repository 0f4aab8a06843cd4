//! Formats settings and their differences. Decides nothing.

use crate::host::words::shortened;
use serde_json::Value;
use spillway_api::{Difference, size_text};

/// Longest value that is shown, in characters.
const MOST_SHOWN: usize = 60;

/// Formats a difference in columns: `ram_bytes`, `256M -> 512M`, `at once`.
pub fn row(difference: &Difference) -> [String; 3] {
    let when = if difference.live { "at once" } else { "at the next start" };
    [difference.setting.clone(), change_text(difference), when.into()]
}

/// Formats a change, such as `256M -> 512M`.
pub fn change_text(Difference { setting, now, then, .. }: &Difference) -> String {
    format!("{} -> {}", value_text(setting, now), value_text(setting, then))
}

/// Formats a value for people: sizes with units, long values shortened.
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
    shortened(&text, MOST_SHOWN)
}

#[cfg(test)]
mod tests {
    use super::*;
    use spillway_api::differences;

    fn differ(now: &str, then: &str) -> Vec<[String; 3]> {
        let spec =
            |settings: &str| serde_json::from_str(&format!(r#"{{"image": "debian"{settings}}}"#)).unwrap();
        let all = differences(&"desk".parse().unwrap(), &spec(now), &spec(then));
        all.iter().map(row).collect()
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

//! What differs between two sets of settings, one by one. Decides nothing.
//!
//! Invariant: settings that mean the same do not differ, whether they are said or usual.

use super::CatalogSpec;
use crate::Name;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use utoipa::ToSchema;

/// A setting whose value a change replaces.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Difference {
    /// Its name; what is below it after a dot.
    pub setting: String,
    /// What it is; null for nothing.
    pub now: Value,
    /// Value of the setting after the change.
    pub then: Value,
    /// Whether machines that run take it, or only those that start.
    pub live: bool,
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

//! Differences between two sets of settings. Decides nothing.
//!
//! Invariant: equivalent settings do not differ, whether they are given or defaults.

use super::CatalogSpec;
use crate::{FleetCatalogSpec, FleetSettings, Name};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use utoipa::ToSchema;

/// A setting whose value a change replaces.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Difference {
    /// Name of the setting; nested names are separated by dots.
    pub setting: String,
    /// Value of the setting now; null if there is none.
    pub now: Value,
    /// Value of the setting after the change.
    pub then: Value,
    /// Whether running machines apply the change, or only the next start does.
    pub live: bool,
}

/// Returns all differences, in the order of the settings' names.
pub fn differences(catalog: &Name, now: &CatalogSpec, then: &CatalogSpec) -> Vec<Difference> {
    compare(&now.with_defaults(catalog), &then.with_defaults(catalog), CatalogSpec::is_live)
}

/// Returns all differences between the settings of a catalog of a fleet, in the order of their names.
pub fn fleet_differences(catalog: &Name, now: &FleetCatalogSpec, then: &FleetCatalogSpec) -> Vec<Difference> {
    // What only fleets have changes where machines are, and no machine.
    let is_live = |setting: &str| FleetSettings::NAMES.contains(&setting) || CatalogSpec::is_live(setting);
    compare(&now.with_defaults(catalog), &then.with_defaults(catalog), is_live)
}

fn compare<S: Serialize>(now: &S, then: &S, is_live: impl Fn(&str) -> bool) -> Vec<Difference> {
    let (now, then) = (settings(now), settings(then));
    let names: BTreeSet<&String> = now.keys().chain(then.keys()).collect();
    let of = |settings: &BTreeMap<String, Value>, name: &str| settings.get(name).cloned().unwrap_or_default();
    let differ = names.into_iter().filter(|name| of(&now, name) != of(&then, name));
    let difference = |name: &String| {
        let live = is_live(name.split('.').next().unwrap_or(name));
        Difference { setting: name.clone(), now: of(&now, name), then: of(&then, name), live }
    };
    differ.map(difference).collect()
}

/// Returns the settings by name; each label is a setting of its own. They are those of a catalog of a host or of a fleet.
pub fn settings(spec: &impl Serialize) -> BTreeMap<String, Value> {
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

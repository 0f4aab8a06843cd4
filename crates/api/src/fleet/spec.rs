//! Settings of a catalog of a fleet: those of a catalog of one host, and how its machines are spread over hosts. Owns the settings
//! and their defaults.
//!
//! Invariant: in JSON and in files all settings are on one level, and none is taken that there is not.

use super::Wave;
use crate::{CatalogSpec, Name};
use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use utoipa::ToSchema;

/// Default time since the last sign of life after which a host counts as lost, in seconds.
pub const LOST_AFTER_SECONDS_DEFAULT: u32 = 45;

/// Settings of a catalog of a fleet. Its `count` is that of all hosts together.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
pub struct FleetCatalogSpec {
    /// Settings that a catalog of one host has, too.
    #[serde(flatten)]
    #[schema(inline)]
    pub catalog: CatalogSpec,
    /// Settings that only catalogs of fleets have.
    #[serde(flatten)]
    #[schema(inline)]
    pub fleet: FleetSettings,
}

/// Settings that only catalogs of fleets have.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct FleetSettings {
    /// How machines are distributed over the hosts of a zone.
    #[serde(default)]
    pub spread: Spread,
    /// Zones whose hosts may have machines; empty: all.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub zones: Vec<Name>,
    /// Labels that a host needs to have machines.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub host_labels: BTreeMap<Name, String>,
    /// Whether machines get names of their hosts, or keep theirs wherever they run.
    #[serde(default)]
    pub identity: IdentityKind,
    /// Seconds since the last sign of life of a host after which its machines are replaced on other hosts.
    #[serde(default = "lost_after_seconds")]
    pub lost_after_seconds: u32,
    /// What happens to named machines of a host that has no connection to the fleet.
    #[serde(default)]
    pub on_isolation: IsolationAction,
    /// Number of machines that stay ready during a rollout.
    #[serde(default)]
    pub min_ready: u32,
    /// Waves of a rollout over hosts, in their order. By default `1`, `10%`, `50%` and `100%`.
    #[serde(default = "waves")]
    #[schema(value_type = Vec<String>)]
    pub waves: Vec<Wave>,
}

fn lost_after_seconds() -> u32 {
    LOST_AFTER_SECONDS_DEFAULT
}

fn waves() -> Vec<Wave> {
    vec![Wave::Hosts(1), Wave::Percent(10), Wave::Percent(50), Wave::Percent(100)]
}

impl Default for FleetSettings {
    fn default() -> FleetSettings {
        FleetSettings {
            spread: Spread::default(),
            zones: Vec::new(),
            host_labels: BTreeMap::new(),
            identity: IdentityKind::default(),
            lost_after_seconds: lost_after_seconds(),
            on_isolation: IsolationAction::default(),
            min_ready: 0,
            waves: waves(),
        }
    }
}

impl FleetSettings {
    /// Names of these settings.
    pub const NAMES: [&str; 8] = [
        "spread",
        "zones",
        "host_labels",
        "identity",
        "lost_after_seconds",
        "on_isolation",
        "min_ready",
        "waves",
    ];
}

impl FleetCatalogSpec {
    /// Returns the default settings, with an image `x`.
    pub fn defaults() -> FleetCatalogSpec {
        FleetCatalogSpec { catalog: CatalogSpec::defaults(), fleet: FleetSettings::default() }
    }

    /// Pattern of machine names on a host, for a catalog of this name.
    pub fn naming(&self, catalog: &Name, host: &str) -> String {
        self.catalog.naming.clone().unwrap_or_else(|| format!("{catalog}-{host}-###"))
    }

    /// Fills in all defaults, so that equivalent settings are equal. `HOST` stands for the name of the host in names of machines.
    pub fn with_defaults(&self, catalog: &Name) -> FleetCatalogSpec {
        let naming = Some(self.naming(catalog, "HOST"));
        let of_host = CatalogSpec { naming, ..self.catalog.with_defaults(catalog) };
        FleetCatalogSpec { catalog: of_host, fleet: self.fleet.clone() }
    }

    /// Whether its machines keep data, which stays on the host that they are on: they are never replaced elsewhere.
    pub fn keeps_data(&self) -> bool {
        self.catalog.keeps_writes() || self.catalog.data_disk_bytes.is_some()
    }
}

impl<'de> Deserialize<'de> for FleetCatalogSpec {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<FleetCatalogSpec, D::Error> {
        let all = Map::deserialize(from)?;
        let is_of_fleet = |name: &String| FleetSettings::NAMES.contains(&name.as_str());
        let (fleet, catalog) = all.into_iter().partition::<Map<_, _>, _>(|(name, _)| is_of_fleet(name));
        let fleet = serde_json::from_value(Value::Object(fleet)).map_err(D::Error::custom)?;
        let catalog = serde_json::from_value(Value::Object(catalog)).map_err(D::Error::custom)?;
        Ok(FleetCatalogSpec { catalog, fleet })
    }
}

/// How machines are distributed over the hosts of a zone.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Spread {
    /// The next machine goes to the host with most memory left.
    #[default]
    Even,
    /// The next machine goes to the host with least memory left that has enough.
    Pack,
}

/// What a machine's name belongs to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum IdentityKind {
    /// Machines are interchangeable. They have names of their hosts, and are never moved: others are made elsewhere.
    #[default]
    Any,
    /// Each machine has a name of the fleet, which is alive on one host at a time.
    Named,
}

/// What happens to named machines of a host that has no connection to the fleet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum IsolationAction {
    /// They run on, and are not replaced elsewhere.
    #[default]
    Keep,
    /// They are paused, and may be replaced elsewhere. Then they are ended.
    Pause,
    /// They are ended, and may be replaced elsewhere.
    Stop,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fleet_differences;

    #[test]
    fn settings_of_host_and_fleet_are_on_one_level() {
        let text = r#"{"image": "debian:3", "count": 5000, "zones": ["a"], "waves": ["1", "100%"], "ram_bytes": 67108864}"#;
        let spec: FleetCatalogSpec = serde_json::from_str(text).unwrap();
        assert_eq!((spec.catalog.count, spec.fleet.lost_after_seconds), (5000, 45));
        assert_eq!(spec.fleet.waves, [Wave::Hosts(1), Wave::Percent(100)]);
        let json = serde_json::to_value(&spec).unwrap();
        assert_eq!((&json["ram_bytes"], &json["zones"][0]), (&67_108_864.into(), &"a".into()));
        assert_eq!(serde_json::from_value::<FleetCatalogSpec>(json).unwrap(), spec);
        for wrong in [r#""zone": "a""#, r#""waves": ["0"]"#, r#""identity": "both""#, r#""zones": ["A"]"#] {
            let text = format!(r#"{{"image": "debian", {wrong}}}"#);
            assert!(serde_json::from_str::<FleetCatalogSpec>(&text).is_err(), "{wrong}");
        }
    }

    #[test]
    fn what_means_the_same_does_not_differ() {
        let desk: Name = "desk".parse().unwrap();
        let spec = |settings: &str| -> FleetCatalogSpec {
            serde_json::from_str(&format!(r#"{{"image": "debian"{settings}}}"#)).unwrap()
        };
        let differ = |now: &str, then: &str| {
            let all = fleet_differences(&desk, &spec(now), &spec(then));
            all.into_iter().map(|one| (one.setting, one.live)).collect::<Vec<_>>()
        };
        assert_eq!(differ("", r#", "lost_after_seconds": 45, "waves": ["1", "10%", "50%", "100%"]"#), []);
        assert_eq!(
            differ(
                "",
                r#", "zones": ["a"], "host_labels": {"gpu": "yes"}, "min_ready": 2, "naming": "desk-###", "vcpus": 2"#
            ),
            [
                ("host_labels.gpu".into(), true),
                ("min_ready".into(), true),
                ("naming".into(), false),
                ("vcpus".into(), false),
                ("zones".into(), true)
            ]
        );
        assert_eq!(spec("").naming(&desk, "a"), "desk-a-###");
    }

    #[test]
    fn machines_that_keep_data_are_known() {
        for (settings, keeps) in [
            ("", false),
            (r#", "type": "dedicated""#, true),
            (r#", "reset": "never""#, true),
            (r#", "data_disk_bytes": 1048576"#, true),
        ] {
            let spec: FleetCatalogSpec =
                serde_json::from_str(&format!(r#"{{"image": "debian"{settings}}}"#)).unwrap();
            assert_eq!(spec.keeps_data(), keeps, "{settings}");
        }
    }

    #[test]
    fn the_names_of_settings_are_all_there_are() {
        let full = FleetSettings {
            zones: vec!["a".parse().unwrap()],
            host_labels: BTreeMap::from([("gpu".parse().unwrap(), "yes".into())]),
            ..FleetSettings::default()
        };
        let json = serde_json::to_value(full).unwrap();
        let mut names: Vec<_> = json.as_object().unwrap().keys().map(String::as_str).collect();
        names.sort_unstable();
        let mut known = FleetSettings::NAMES;
        known.sort_unstable();
        assert_eq!(names, known);
    }
}

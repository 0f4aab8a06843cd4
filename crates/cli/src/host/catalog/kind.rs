//! Catalogs of a host and catalogs of a fleet: what commands for both need to know of them. Decides nothing.
//!
//! Invariant: a file of catalogs of one kind is read back as it was written, and one of the other kind is refused if it has settings
//! that this kind has not.

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};
use spillway_api::{
    Catalog, CatalogSpec, Difference, FleetCatalog, FleetCatalogSpec, FleetSettings, Name, differences,
    fleet_differences,
};

/// Settings of a catalog, as they stand in a file.
pub trait FileSettings: Clone + Serialize + DeserializeOwned {
    /// Default settings, with an image `x`.
    fn defaults() -> Self;

    /// Names of all settings.
    fn names() -> Vec<String>;

    /// What to say about a setting that this kind has not, if another one has.
    fn elsewhere(setting: &str) -> Option<&'static str>;

    /// Names of the settings that the reader may not see.
    fn redacted(&self) -> &[String];

    /// Differences between two sets of settings of this catalog.
    fn differences(catalog: &Name, now: &Self, then: &Self) -> Vec<Difference>;

    /// The settings, as they are in JSON.
    fn object(&self) -> Map<String, Value> {
        match serde_json::to_value(self) {
            Ok(Value::Object(fields)) => fields,
            other => unreachable!("settings are an object, not {other:?}"),
        }
    }
}

/// A catalog that the daemon has.
pub trait CatalogObject: Serialize + DeserializeOwned {
    /// Its settings.
    type Spec: FileSettings;
    /// Path of the list of such catalogs.
    const LIST: &'static str;

    /// Path of the catalog of this name.
    fn path(name: &Name) -> String {
        format!("{}/{name}", Self::LIST)
    }

    /// Name of the catalog.
    fn name(&self) -> &Name;

    /// Revision that a change is based on.
    fn revision(&self) -> u64;

    /// Its settings.
    fn spec(&self) -> &Self::Spec;

    /// What the daemon warns of.
    fn warnings(&self) -> &[String];
}

impl FileSettings for CatalogSpec {
    fn defaults() -> CatalogSpec {
        CatalogSpec::defaults()
    }

    fn names() -> Vec<String> {
        CatalogSpec::defaults().object().into_iter().map(|(name, _)| name).collect()
    }

    fn elsewhere(setting: &str) -> Option<&'static str> {
        let is_of_fleets = FleetSettings::NAMES.contains(&setting);
        is_of_fleets.then_some("only catalogs of a fleet have it ('spillway fleet catalog')")
    }

    fn redacted(&self) -> &[String] {
        &self.redacted
    }

    fn differences(catalog: &Name, now: &CatalogSpec, then: &CatalogSpec) -> Vec<Difference> {
        differences(catalog, now, then)
    }
}

impl FileSettings for FleetCatalogSpec {
    fn defaults() -> FleetCatalogSpec {
        FleetCatalogSpec::defaults()
    }

    fn names() -> Vec<String> {
        let of_fleets = FleetSettings::NAMES.into_iter().map(str::to_owned);
        <CatalogSpec as FileSettings>::names().into_iter().chain(of_fleets).collect()
    }

    fn elsewhere(_: &str) -> Option<&'static str> {
        None
    }

    fn redacted(&self) -> &[String] {
        &self.catalog.redacted
    }

    fn differences(catalog: &Name, now: &FleetCatalogSpec, then: &FleetCatalogSpec) -> Vec<Difference> {
        fleet_differences(catalog, now, then)
    }
}

impl CatalogObject for Catalog {
    type Spec = CatalogSpec;
    const LIST: &'static str = "/v1/catalogs";

    fn name(&self) -> &Name {
        &self.name
    }

    fn revision(&self) -> u64 {
        self.revision
    }

    fn spec(&self) -> &CatalogSpec {
        &self.spec
    }

    fn warnings(&self) -> &[String] {
        &self.warnings
    }
}

impl CatalogObject for FleetCatalog {
    type Spec = FleetCatalogSpec;
    const LIST: &'static str = "/v1/fleet/catalogs";

    fn name(&self) -> &Name {
        &self.name
    }

    fn revision(&self) -> u64 {
        // A negative one is none: the daemon refuses 0.
        u64::try_from(self.revision).unwrap_or_default()
    }

    fn spec(&self) -> &FleetCatalogSpec {
        &self.spec
    }

    fn warnings(&self) -> &[String] {
        &[]
    }
}

//! Fleets: catalogs whose machines many hosts share.

mod spec;
mod wave;

pub use spec::{
    FleetCatalogSpec, FleetSettings, IdentityKind, IsolationAction, LOST_AFTER_SECONDS_DEFAULT, Spread,
};
pub use wave::{Wave, WaveError};

//! Machines.

use crate::Name;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// A machine: an identity that outlives every reset, and what it is now.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Machine {
    /// Its name, and its guest's host name.
    pub name: Name,
    /// The catalog that it is of.
    pub catalog: Name,
    /// Its number there, counted from 1.
    pub number: u32,
    /// What stays the same over resets.
    pub identity: Identity,
    /// When it was recorded.
    #[schema(value_type = String, format = DateTime)]
    pub created: Timestamp,
}

/// What stays the same over resets.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Identity {
    /// The SMBIOS UUID. cloud-init's instance id is `iid-` and this.
    pub uuid: String,
    /// The address of its network card, administered locally.
    pub mac: String,
}

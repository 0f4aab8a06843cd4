//! What a machine is started with where its catalog leaves that to the image: firmware and operating system. Owns the rule that a
//! setting of the catalog comes first.

use crate::error::HostError;
use serde::{Deserialize, Serialize};
use spillway_api::{CatalogSpec, Firmware, GuestSystem};
use utoipa::ToSchema;

/// Firmware and operating system of a machine: as its catalog says, or else as its image needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct BootChoice {
    /// Firmware of the machine.
    pub firmware: Firmware,
    /// Operating system of the guest.
    pub guest: GuestSystem,
}

impl Default for BootChoice {
    fn default() -> BootChoice {
        BootChoice { firmware: Firmware::Bios, guest: GuestSystem::Linux }
    }
}

impl BootChoice {
    /// Chooses by the settings, and asks what the image needs if they leave that open.
    pub fn of(
        spec: &CatalogSpec,
        image: impl FnOnce() -> Result<BootChoice, HostError>,
    ) -> Result<BootChoice, HostError> {
        match (spec.hardware.firmware, spec.hardware.guest) {
            (Some(firmware), Some(guest)) => Ok(BootChoice { firmware, guest }),
            (firmware, guest) => {
                let image = image()?;
                let (firmware, guest) = (firmware.unwrap_or(image.firmware), guest.unwrap_or(image.guest));
                Ok(BootChoice { firmware, guest })
            }
        }
    }
}

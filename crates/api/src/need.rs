//! What a machine needs of its host. Owns the rule by which that follows from its settings.

use crate::{CatalogSpec, Hypervisor};
use serde::{Deserialize, Serialize};

/// Need of a machine, or the sum of several.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Need {
    /// Guaranteed size of the cache.
    pub guarantee_bytes: u64,
    /// Limit of the cache.
    pub limit_bytes: u64,
    /// Memory of the guest, without the cache.
    pub guest_bytes: u64,
    /// Processors of the guest.
    pub vcpus: u64,
}

impl Need {
    /// Need of a machine with these settings. The guest counts only if the daemon runs it.
    pub fn of(spec: &CatalogSpec, hypervisor: Hypervisor) -> Need {
        let limit_bytes = spec.ram_bytes().unwrap_or(0);
        let guarantee_bytes = spec.ram_guarantee_bytes.min(limit_bytes);
        let (guest_bytes, vcpus) = match spec.hypervisor(hypervisor) {
            Hypervisor::None => (0, 0),
            Hypervisor::Qemu | Hypervisor::Libvirt => {
                (spec.hardware.memory_bytes, spec.hardware.vcpus.into())
            }
        };
        Need { guarantee_bytes, limit_bytes, guest_bytes, vcpus }
    }

    /// Memory of guest and cache.
    pub fn memory_bytes(self) -> u64 {
        self.guest_bytes.saturating_add(self.limit_bytes)
    }

    /// The cache's part of the need.
    pub fn without_guest(self) -> Need {
        Need { guest_bytes: 0, vcpus: 0, ..self }
    }

    /// The smaller value of each component.
    pub fn at_most(self, most: Need) -> Need {
        self.with(most, u64::min)
    }

    /// The sum of both, without overflow.
    pub fn and(self, other: Need) -> Need {
        self.with(other, u64::saturating_add)
    }

    /// What is left of it without the other; 0 at least.
    pub fn without(self, other: Need) -> Need {
        self.with(other, u64::saturating_sub)
    }

    /// The need of so many machines, without overflow.
    pub fn times(self, machines: u32) -> Need {
        self.with(self, |one, _| one.saturating_mul(machines.into()))
    }

    fn with(self, other: Need, join: impl Fn(u64, u64) -> u64) -> Need {
        Need {
            guarantee_bytes: join(self.guarantee_bytes, other.guarantee_bytes),
            limit_bytes: join(self.limit_bytes, other.limit_bytes),
            guest_bytes: join(self.guest_bytes, other.guest_bytes),
            vcpus: join(self.vcpus, other.vcpus),
        }
    }
}

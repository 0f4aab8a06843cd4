//! A proxy in front of a registry's store that makes it behave like one that is far away, slow, busy or broken: it delays answers,
//! limits their bandwidth, and injects faults.
//!
//! Owns the shape of what the parts below offer to others, and nothing else. Invariant: without a model, an answer is that of the
//! store, byte for byte.

mod bandwidth;
mod control;
mod exchange;
mod fate;
mod figures;
mod model;
mod origin;
mod proxy;
#[cfg(test)]
mod tests;

pub use figures::StoreFigures;
pub use model::{Away, StoreFault, StoreModel};
pub use origin::Origin;
pub use proxy::{StoreProxy, StoreProxySettings};

//! Random numbers that can be had again. Owns no figure.

#[allow(dead_code, reason = "some tests make their own")]
pub mod generate;

#[path = "../../../core/tests/model/rng.rs"]
#[allow(dead_code, reason = "some tests use more of it")]
mod rng;

pub use rng::{Rng, seed};

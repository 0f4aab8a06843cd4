//! Clusters of real etcd for tests, and a proxy in front of a member that cuts, stalls and swallows connections.
//!
//! Owns the shape of what the parts below offer to others, and nothing else. Invariant: a cluster that is dropped has ended.

mod cluster;
mod program;
mod proxy;

pub use cluster::{EtcdCluster, EtcdOptions, EtcdRecord};
pub use program::EtcdProgram;
pub use proxy::{EtcdProxy, ProxyMode};

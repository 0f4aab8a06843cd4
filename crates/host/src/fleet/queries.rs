//! What a daemon answers about its fleet: from the records that it has seen, and from what the placer says. Decides nothing.
//!
//! Invariants: an answer from the records takes little longer than [`PLACER`], whatever other hosts do; one for which all hosts are asked takes
//! up to [`ANSWER`] for each [`AT_A_TIME`] of them. What hosts have answered takes at most [`MOST_BYTES`] at a time, as it was sent.

use super::details;
use super::etcd_details::{away, away_or_refused, etcd_status};
use super::service::{FleetService, locked};
use super::token;
use crate::error::HostError;
use crate::work::blocking;
use axum::body::Bytes;
use futures_util::{StreamExt, stream};
use serde::de::DeserializeOwned;
use spillway_api::{ErrorCode, FleetCatalog, FleetDetails, FleetHost, Membership, Name, PlacerReport};
use spillway_fleet::membership::Standing;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// Time in which a host must answer.
const ANSWER: Duration = Duration::from_secs(3);
/// Time in which the host that places must say what it knows.
const PLACER: Duration = Duration::from_secs(1);
/// Hosts that are asked at a time.
const AT_A_TIME: usize = 64;
/// Most bytes of the answers of all hosts to one question.
const MOST_BYTES: usize = 64 << 20;

impl FleetService {
    /// What the host that places knows; nothing if it does not answer, or if there is none.
    pub async fn placer_report(&self) -> PlacerReport {
        let placer = self.view().placer.as_ref().map(|placer| placer.value.host.clone());
        match placer {
            Some(placer) if placer != self.0.host => {
                let asked = self.0.door.client.get(&placer, "/v1/fleet/placer", PLACER).await;
                asked.unwrap_or_default()
            }
            _ => self.own_placer_report(),
        }
    }

    /// What this host knows, if it places.
    pub fn own_placer_report(&self) -> PlacerReport {
        locked(&self.0.knowledge).clone()
    }

    /// Describes the fleet as this host sees it.
    pub async fn describe(&self) -> FleetDetails {
        self.described(&self.placer_report().await)
    }

    /// All catalogs of the fleet, by what this host knows.
    pub fn own_catalogs(&self) -> Vec<FleetCatalog> {
        details::catalogs(&self.view(), &self.own_placer_report())
    }

    /// Describes the fleet as this host sees it, if the host that places knows this.
    pub fn described(&self, knowledge: &PlacerReport) -> FleetDetails {
        let standing = self.0.standing.borrow().clone();
        let health = self.0.store.health().borrow().clone();
        let view = self.view();
        let (membership, epoch, reason) = match standing {
            Standing::Connecting => (Membership::Connecting, None, away(&health)),
            Standing::NoFleet => (Membership::NoFleet, None, Some(self.no_fleet())),
            Standing::Joining => (Membership::Joining, None, away_or_refused(&health)),
            Standing::Member { epoch } => (Membership::Member, Some(epoch), None),
            Standing::Isolated => (Membership::Isolated, None, away(&health)),
            Standing::Refused(why) => (Membership::Refused, None, Some(why)),
        };
        FleetDetails {
            name: self.0.name.clone(),
            fleet_id: view.meta.as_ref().map(|meta| meta.value.fleet_id.clone()),
            host: self.0.host.clone(),
            membership,
            reason,
            epoch,
            placer: view.placer.as_ref().map(|placer| placer.value.host.clone()),
            places: view.meta.as_ref().is_some_and(|meta| meta.value.placer),
            brake: knowledge.brake.clone(),
            etcd: etcd_status(&self.0.etcd.address.members, &health, view.revision),
            hosts: details::count_hosts(&details::hosts(&view, knowledge)),
            unreadable: view.unreadable.clone(),
        }
    }

    pub(super) fn no_fleet(&self) -> String {
        format!("there is no fleet {} in etcd yet: make it with 'spillway fleet init'", self.0.name)
    }

    /// All hosts of the fleet.
    pub async fn hosts(&self) -> Vec<FleetHost> {
        let known = self.placer_report().await;
        details::hosts(&self.view(), &known)
    }

    /// A host of the fleet.
    ///
    /// # Errors
    /// There is none of this name.
    pub async fn host(&self, name: &Name) -> Result<FleetHost, HostError> {
        let known = self.placer_report().await;
        let view = self.view();
        match view.hosts.get(name) {
            Some(record) => Ok(details::host(&view, name, record, &known)),
            None => {
                let names = view.hosts.keys().map(Name::as_str);
                Err(HostError::not_found("host of the fleet", name.as_str(), names))
            }
        }
    }

    /// All catalogs of the fleet.
    pub async fn catalogs(&self) -> Vec<FleetCatalog> {
        let known = self.placer_report().await;
        details::catalogs(&self.view(), &known)
    }

    /// A catalog of the fleet.
    ///
    /// # Errors
    /// There is none of this name.
    pub async fn catalog(&self, name: &Name) -> Result<FleetCatalog, HostError> {
        let known = self.placer_report().await;
        let view = self.view();
        match view.catalogs.get(name) {
            Some(record) => Ok(details::catalog(&view, name, record, &known)),
            None => {
                let names = view.catalogs.keys().map(Name::as_str);
                Err(HostError::not_found("catalog of the fleet", name.as_str(), names))
            }
        }
    }

    /// Asks hosts for the same, some at a time, each for 3 s at most. What is too much for all of them together is left out.
    pub async fn ask_all<T: DeserializeOwned + Send + 'static>(
        &self,
        hosts: &[Name],
        path: &str,
    ) -> Vec<(Name, Result<T, String>)> {
        let taken = Arc::new(AtomicUsize::new(0));
        let ask = |host: &Name| {
            let (client, host, path) = (self.0.door.client.clone(), host.clone(), path.to_owned());
            let taken = Arc::clone(&taken);
            async move {
                let answer = client.get_bytes(&host, &path, ANSWER).await.map_err(|e| e.to_string());
                let read = |bytes: Bytes| {
                    if taken.fetch_add(bytes.len(), Ordering::Relaxed) + bytes.len() > MOST_BYTES {
                        return Err(format!("the hosts answer more than {} MiB together", MOST_BYTES >> 20));
                    }
                    serde_json::from_slice(&bytes).map_err(|e| format!("its answer is not understood: {e}"))
                };
                (host, answer.and_then(read))
            }
        };
        stream::iter(hosts.iter().map(ask).collect::<Vec<_>>()).buffer_unordered(AT_A_TIME).collect().await
    }

    /// Makes a token by which another host can join.
    ///
    /// # Errors
    /// A file that this host uses for etcd cannot be read.
    pub async fn join_token(&self) -> Result<String, HostError> {
        let etcd = self.0.etcd.clone();
        let failed =
            |e: String| HostError::new(ErrorCode::Internal, format!("the token cannot be made: {e}"));
        let made = blocking(move || token::make(&etcd)).await.map_err(|e| failed(e.to_string()))?;
        made.map_err(|e| failed(format!("{e:#}")))
    }
}

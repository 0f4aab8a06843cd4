//! Routes by which the hosts of a fleet find out whether they reach each other.
//!
//! Invariant: an answer takes little more than [`REACH`], whatever the other host does.

use super::extract::Path;
use super::{ApiState, ProblemResponse};
use crate::error::HostError;
use crate::fleet::door::{FleetDoor, HostClientError, Presence, REACH};
use axum::Json;
use axum::extract::State;
use spillway_api::{ErrorCode, FleetReach, FleetSelf, Name};
use std::sync::Arc;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

pub fn routes() -> OpenApiRouter<ApiState> {
    OpenApiRouter::new().routes(routes!(get_fleet_self)).routes(routes!(get_fleet_reach))
}

/// Returns the fleet of this host.
pub(super) fn fleet(app: &ApiState) -> Result<Arc<FleetDoor>, HostError> {
    let none =
        || HostError::new(ErrorCode::Conflict, "this host is in no fleet: start spillwayd with --fleet");
    app.fleet.clone().ok_or_else(none)
}

/// Error of a request to another host.
pub(super) fn host_error(error: &HostClientError) -> HostError {
    match error {
        HostClientError::Unknown { .. } => HostError::new(ErrorCode::NotFound, error.to_string()),
        HostClientError::Unreachable { .. } => HostError::new(ErrorCode::Unavailable, error.to_string()),
    }
}

/// Returns what this host is in its fleet.
#[utoipa::path(get, path = "/self", responses((status = 200, body = FleetSelf), ProblemResponse))]
async fn get_fleet_self(State(app): State<ApiState>) -> Result<Json<FleetSelf>, HostError> {
    let fleet = fleet(&app)?;
    let epoch = fleet.members.get(&fleet.host).map(|member| member.epoch).filter(|epoch| *epoch != 0);
    Ok(Json(FleetSelf { host: fleet.host.clone(), epoch, instance: fleet.instance.clone() }))
}

/// Returns whether this host reaches another one of its fleet: whether the daemon there answers within 2 s, or refuses this host.
#[utoipa::path(get, path = "/reach/{host}", params(("host" = Name, Path)), responses((status = 200, body = FleetReach), ProblemResponse))]
async fn get_fleet_reach(
    State(app): State<ApiState>,
    Path(host): Path<Name>,
) -> Result<Json<FleetReach>, HostError> {
    let fleet = fleet(&app)?;
    let (reaches, why) = match fleet.client.look(&host, REACH).await.map_err(|error| host_error(&error))? {
        Presence::Answers => (true, None),
        // Its daemon runs, and so do its machines.
        Presence::Refuses(why) => (true, Some(why)),
        Presence::Silent(why) => (false, Some(why)),
    };
    Ok(Json(FleetReach { host, reaches, why }))
}

//! Routes of catalogs.

use super::conditions::{IfMatch, Tagged};
use super::extract::{Body, DryRun, IdempotencyKey, PageQuery, Path, Query, part, select};
use super::{ApiState, ProblemResponse, ask, ask_for};
use crate::access::caller::{Caller, Role};
use crate::access::note::RequestNote;
use crate::catalogs::CatalogChangeTerms;
use crate::error::HostError;
use crate::idempotency::IdempotentRequest;
use crate::paging::PageBuilder;
use crate::store::Revision;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use serde::Deserialize;
use spillway_api::{
    Catalog, CatalogCurve, CatalogKind, CatalogRollback, CatalogSpec, CatalogUpdate, Difference, Empty,
    EventKind, MachineDetails, Name, NewCatalog, NewMachine, Page, RolloutAction, RolloutChange, differences,
};
use utoipa::IntoParams;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

type JsonResult<T> = Result<Json<T>, HostError>;
type TaggedCatalog = Result<Tagged<Catalog>, HostError>;

pub fn routes() -> OpenApiRouter<ApiState> {
    OpenApiRouter::new()
        .routes(routes!(list_catalogs, create_catalog))
        .routes(routes!(get_catalog, replace_catalog, delete_catalog))
        .routes(routes!(create_machine))
        .routes(routes!(get_catalog_curve))
        .routes(routes!(update_catalog))
        .routes(routes!(change_catalog_rollout))
        .routes(routes!(roll_back_catalog))
}

/// Query parameters of the list.
#[derive(IntoParams)]
#[into_params(parameter_in = Query)]
#[expect(dead_code, reason = "for the document")]
struct CatalogQuery {
    /// Lists only catalogs with this label, `KEY=VALUE`; if given several times, with all of them.
    #[param(required = false)]
    label: Vec<String>,
}

/// Lists all catalogs, or those with certain labels.
#[utoipa::path(get, path = "", params(CatalogQuery, PageQuery), responses((status = 200, body = Page<Catalog>), ProblemResponse))]
async fn list_catalogs(
    State(app): State<ApiState>,
    Extension(caller): Extension<Caller>,
    Query(mut pairs): Query<Vec<(String, String)>>,
) -> JsonResult<Page<Catalog>> {
    let part = part(&mut pairs)?;
    let selector = select(pairs, &["label"])?;
    ask(move || {
        let mut page = PageBuilder::new(&part);
        for catalog in app.catalogs.list_after(&part.after) {
            let catalog = catalog?;
            let is_chosen = selector.chooses(&catalog);
            let name = catalog.name.clone();
            let seen = |catalog| seen_by(caller.role, app.machines.rollouts.with_progress(catalog));
            if is_chosen && !page.add(name.as_str(), seen(catalog)) {
                break;
            }
        }
        Ok(page.page())
    })
    .await
}

/// Removes what is passed on to guests for callers who may only read: it may contain secrets.
fn seen_by(role: Role, mut catalog: Catalog) -> Catalog {
    if role == Role::Read {
        catalog.spec.redact();
    }
    catalog
}

/// Notes the changed settings for the audit log.
fn note_change(note: &RequestNote, before: &Catalog, after: &Catalog) {
    let mut changed = differences(&after.name, &before.spec, &after.spec);
    if before.version != after.version {
        let (now, then) = (before.version.into(), after.version.into());
        changed.push(Difference { setting: "version".into(), now, then, live: false });
    }
    note.changed(changed);
}

/// A catalog with its tag, which is its revision.
fn tagged(catalog: Catalog) -> Tagged<Catalog> {
    Tagged(Revision(catalog.revision).into(), catalog)
}

/// Creates a catalog. Its machines are recorded before the response.
#[utoipa::path(post, path = "", params(DryRun, IdempotencyKey), request_body = NewCatalog, responses((status = 200, body = Catalog, headers(("ETag" = String, description = "Tag of the object, for `If-Match` of a later request."))), ProblemResponse))]
async fn create_catalog(
    State(app): State<ApiState>,
    Extension(caller): Extension<Caller>,
    note: RequestNote,
    key: IdempotencyKey,
    Query(DryRun { dry_run }): Query<DryRun>,
    Body(new): Body<NewCatalog>,
) -> TaggedCatalog {
    if new.spec.kind == CatalogKind::Pooled {
        app.images.refuse_members(&new.spec.image, new.spec.hardware.guest).await?;
    }
    let key = if dry_run { IdempotentRequest::default() } else { key.of(&caller.name, "catalogs", &new) };
    let made = ask_for(move || {
        note.name(new.name.as_str());
        let (mut catalog, is_repeated) = app.catalogs.create(&new.name, &new.spec, dry_run, &key)?;
        catalog.warnings.extend(app.images.warnings(&catalog));
        app.idempotency.note(&key);
        match is_repeated {
            true => note.repeated(),
            false if dry_run => return Ok(catalog.with_effective()),
            false => note.made(&new.spec),
        }
        Ok(catalog)
    });
    made.await.map(tagged)
}

/// Returns a catalog.
#[utoipa::path(get, path = "/{name}", params(("name" = Name, Path)), responses((status = 200, body = Catalog, headers(("ETag" = String, description = "Tag of the object, for `If-Match` of a later request."))), ProblemResponse))]
async fn get_catalog(
    State(app): State<ApiState>,
    Extension(caller): Extension<Caller>,
    Path(name): Path<Name>,
) -> TaggedCatalog {
    let seen =
        move || Ok(seen_by(caller.role, app.machines.rollouts.with_progress(app.catalogs.get(&name)?)));
    ask_for(seen).await.map(tagged)
}

/// Adds a machine to a catalog whose VMM is external, and raises its count by one. If the catalog has a machine of this name and
/// size, the response is that machine.
#[utoipa::path(post, path = "/{name}/machines", params(("name" = Name, Path)), request_body = NewMachine, responses((status = 200, body = MachineDetails), ProblemResponse))]
async fn create_machine(
    State(app): State<ApiState>,
    note: RequestNote,
    Path(name): Path<Name>,
    Body(new): Body<NewMachine>,
) -> JsonResult<MachineDetails> {
    ask(move || {
        let (machine, is_repeated) = app.machines.actions.add(&name, &new)?;
        note.recorded(new.name.as_str());
        if is_repeated {
            note.repeated();
        }
        Ok(machine)
    })
    .await
}

/// Returns the sum of the curves of a catalog's machines: what every size of all their RAM tiers would have done. It is at most
/// about half a minute old. `conflict`: no disk with a RAM tier is served.
#[utoipa::path(get, path = "/{name}/curve", params(("name" = Name, Path)), responses((status = 200, body = CatalogCurve), ProblemResponse))]
async fn get_catalog_curve(
    State(app): State<ApiState>,
    Path(name): Path<Name>,
) -> Result<Response, HostError> {
    let curve = app.machines.curves.of_catalog(&name).await?;
    Ok(Json(&*curve).into_response())
}

/// Conditions of the change.
#[derive(Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct ChangeTerms {
    /// With `true` the change may discard data that machines keep.
    #[serde(default)]
    discard_data: bool,
    /// With `true` the kept files of removed machines are deleted too; else they stay in their store.
    #[serde(default)]
    with_data: bool,
    /// With `true` machines are removed even if they are claimed.
    #[serde(default)]
    force: bool,
    /// With `true` the request is checked in full and nothing is changed; the answer is what the change would make.
    #[serde(default)]
    dry_run: bool,
}

/// Replaces all settings of a catalog; a setting that is left out gets its default.
#[utoipa::path(put, path = "/{name}", params(("name" = Name, Path), IfMatch, ChangeTerms), request_body = CatalogSpec, responses((status = 200, body = Catalog, headers(("ETag" = String, description = "Tag of the object, for `If-Match` of a later request."))), ProblemResponse))]
async fn replace_catalog(
    State(app): State<ApiState>,
    Path(name): Path<Name>,
    IfMatch(expected): IfMatch,
    note: RequestNote,
    Query(terms): Query<ChangeTerms>,
    Body(spec): Body<CatalogSpec>,
) -> TaggedCatalog {
    if spec.kind == CatalogKind::Pooled && changes_pool(&app, &name, &spec).await? {
        app.images.refuse_members(&spec.image, spec.hardware.guest).await?;
    }
    let ChangeTerms { discard_data, with_data, force, dry_run } = terms;
    let terms = CatalogChangeTerms {
        expected,
        discard_data,
        with_data,
        force,
        dry_run,
        ..CatalogChangeTerms::default()
    };
    let changed = ask_for(move || {
        let (mut catalog, before) = app.catalogs.change(&name, &spec, terms)?;
        catalog.warnings.extend(app.images.warnings(&catalog));
        if dry_run {
            return Ok(catalog.with_effective());
        }
        note_change(&note, &before, &catalog);
        Ok(catalog)
    });
    changed.await.map(tagged)
}

/// Whether these settings make a pool of the catalog, or a pool of another image or guest. What is a pool of that image already may be changed
/// in other ways: made smaller, above all.
async fn changes_pool(app: &ApiState, name: &Name, spec: &CatalogSpec) -> Result<bool, HostError> {
    let (app, name) = (app.clone(), name.clone());
    let before = ask_for(move || app.catalogs.get(&name)).await?.spec;
    Ok(before.kind != spec.kind || before.image != spec.image || before.hardware.guest != spec.hardware.guest)
}

/// Conditions of the deletion.
#[derive(Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct DeleteTerms {
    /// With `true` the kept files of the machines are deleted too; else they stay in their store.
    #[serde(default)]
    with_data: bool,
    /// With `true` the catalog is deleted even if machines are claimed.
    #[serde(default)]
    force: bool,
    /// With `true` the request is checked in full and nothing is deleted.
    #[serde(default)]
    dry_run: bool,
}

/// Deletes a catalog and its machines. Machines that run are ended: with their grace if they keep data that stays, else
/// at once.
#[utoipa::path(delete, path = "/{name}", params(("name" = Name, Path), IfMatch, DeleteTerms), responses((status = 200, body = Empty), ProblemResponse))]
async fn delete_catalog(
    State(app): State<ApiState>,
    Path(name): Path<Name>,
    IfMatch(expected): IfMatch,
    Query(DeleteTerms { with_data, force, dry_run }): Query<DeleteTerms>,
) -> JsonResult<Empty> {
    let terms = CatalogChangeTerms { expected, with_data, force, dry_run, ..CatalogChangeTerms::default() };
    ask(move || app.catalogs.delete(&name, terms).map(|()| Empty {})).await
}

/// Changes the version of a catalog's machines, or the strategy of its rollout. Replaces a rollout in progress.
#[utoipa::path(post, path = "/{name}/update", params(("name" = Name, Path), IfMatch, DryRun), request_body = CatalogUpdate, responses((status = 200, body = Catalog, headers(("ETag" = String, description = "Tag of the object, for `If-Match` of a later request."))), ProblemResponse))]
async fn update_catalog(
    State(app): State<ApiState>,
    Path(name): Path<Name>,
    IfMatch(expected): IfMatch,
    note: RequestNote,
    Query(DryRun { dry_run }): Query<DryRun>,
    Body(update): Body<CatalogUpdate>,
) -> TaggedCatalog {
    let (asked, updating) = (app.clone(), name.clone());
    let spec = ask_for(move || asked.catalogs.get(&updating)).await?.spec;
    if spec.kind == CatalogKind::Pooled {
        app.images.refuse_members(&update.image, spec.hardware.guest).await?;
    }
    let terms = CatalogChangeTerms { expected, dry_run, ..CatalogChangeTerms::default() };
    let updated = ask_for(move || {
        let (mut catalog, before) = app.catalogs.update(&name, &update, terms)?;
        catalog.warnings.extend(app.images.warnings(&catalog));
        if !dry_run {
            note_change(&note, &before, &catalog);
        }
        Ok(catalog)
    });
    updated.await.map(tagged)
}

/// Pauses, resumes or aborts a catalog's rollout. Machines that have the version keep it in any case. `conflict`: there
/// is no rollout in progress.
#[utoipa::path(post, path = "/{name}/rollout", params(("name" = Name, Path), IfMatch), request_body = RolloutChange, responses((status = 200, body = Catalog, headers(("ETag" = String, description = "Tag of the object, for `If-Match` of a later request."))), ProblemResponse))]
async fn change_catalog_rollout(
    State(app): State<ApiState>,
    Extension(caller): Extension<Caller>,
    Path(name): Path<Name>,
    IfMatch(expected): IfMatch,
    note: RequestNote,
    Body(RolloutChange { action }): Body<RolloutChange>,
) -> TaggedCatalog {
    note.verb(match action {
        RolloutAction::Pause => "pause rollout",
        RolloutAction::Resume => "resume rollout",
        RolloutAction::Abort => "abort rollout",
    });
    let changed = ask_for(move || {
        let (catalog, is_changed) = app.catalogs.change_rollout(
            &name,
            action,
            CatalogChangeTerms { expected, ..CatalogChangeTerms::default() },
        )?;
        let what = match action {
            RolloutAction::Pause => "is paused",
            RolloutAction::Resume => "is resumed",
            RolloutAction::Abort => {
                "is aborted: machines that have the version keep it, the others take it at their next start"
            }
        };
        if is_changed {
            let text = format!("its rollout {what} (by {caller})");
            app.events.raise(EventKind::Rollout, &format!("catalog/{name}"), text);
        }
        Ok(app.machines.rollouts.with_progress(catalog))
    });
    changed.await.map(tagged)
}

/// Moves a catalog back to a version of its history. It keeps that version until the next update.
#[utoipa::path(post, path = "/{name}/rollback", params(("name" = Name, Path), IfMatch, DryRun), request_body = CatalogRollback, responses((status = 200, body = Catalog, headers(("ETag" = String, description = "Tag of the object, for `If-Match` of a later request."))), ProblemResponse))]
async fn roll_back_catalog(
    State(app): State<ApiState>,
    Path(name): Path<Name>,
    IfMatch(expected): IfMatch,
    note: RequestNote,
    Query(DryRun { dry_run }): Query<DryRun>,
    Body(rollback): Body<CatalogRollback>,
) -> TaggedCatalog {
    let terms = CatalogChangeTerms { expected, dry_run, ..CatalogChangeTerms::default() };
    let moved = ask_for(move || {
        let (catalog, before) = app.catalogs.rollback(&name, &rollback, terms)?;
        if !dry_run {
            note_change(&note, &before, &catalog);
        }
        Ok(catalog)
    });
    moved.await.map(tagged)
}

//! What a registry needs of a store. Owns the contract of each operation.

use crate::error::RegistryError;
use std::future::Future;

/// An object as a list shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListedObject {
    /// Key of the object, below the registry's prefix.
    pub key: String,
    /// Time of the last write by the store's clock, in seconds since 1970.
    pub modified_seconds: i64,
    /// Size of the object, in bytes.
    pub size_bytes: u64,
}

/// A store of objects. An operation that returned `Ok` is visible to every later operation of every client.
pub trait Objects: Sync {
    /// Returns an object, or `None` if there is none of this key. More than `most_bytes` is an error of kind `Damaged`.
    fn get(
        &self,
        key: &str,
        most_bytes: u64,
    ) -> impl Future<Output = Result<Option<Vec<u8>>, RegistryError>> + Send;

    /// Whether there is an object of this key.
    fn exists(&self, key: &str) -> impl Future<Output = Result<bool, RegistryError>> + Send;

    /// Writes an object, whether there was one or not.
    fn put(&self, key: &str, content: Vec<u8>) -> impl Future<Output = Result<(), RegistryError>> + Send;

    /// Writes an object if there is none of this key, in one step. Returns `false` if there was one.
    fn create(&self, key: &str, content: Vec<u8>)
    -> impl Future<Output = Result<bool, RegistryError>> + Send;

    /// Returns all objects whose key begins with `folder` and a slash, in any order.
    fn list(&self, folder: &str) -> impl Future<Output = Result<Vec<ListedObject>, RegistryError>> + Send;

    /// Deletes objects. One that is not there is no error.
    fn delete(&self, keys: Vec<String>) -> impl Future<Output = Result<(), RegistryError>> + Send;

    /// Waits for so many seconds.
    fn pause(&self, seconds: u64) -> impl Future<Output = ()> + Send;
}

//! Places for the clients of the control socket, and the roles of users. No IO.
//!
//! At most [`CLIENTS`] clients are connected. Readers leave [`FOR_OWNERS`] places free, and owners that are not root leave
//! [`FOR_ROOT`] free: no user can keep an administrator out. A reading user has at most [`PER_READER`] places, an owner that is not root
//! at most [`PER_OWNER`].

use thiserror::Error;
use towpath_metrics::metrics;

use super::command::Access;
use super::protocol::{Code, Refusal};

/// Maximum number of clients.
const CLIENTS: usize = 64;

/// Places for owners only.
const FOR_OWNERS: usize = 16;

/// Of these, places for root only.
const FOR_ROOT: usize = 8;

/// Maximum number of clients of one user with read access only.
const PER_READER: usize = 8;

/// Maximum number of clients of one owner other than root.
const PER_OWNER: usize = 32;

metrics! {
    /// Clients of the control socket.
    pub struct ControlStats in "control" {
        /// Clients that are connected.
        pub clients: gauge connections,
        /// Clients that were accepted.
        pub accepted: counter connections,
        /// Clients refused because their user has no access.
        pub not_permitted: counter connections as "refused": "Clients refused, by reason." (reason = "not_permitted"),
        /// Clients refused because all places were taken.
        pub too_many: counter connections as "refused" (reason = "too_many"),
        /// Clients refused because their user had all of its places.
        pub user_limit: counter connections as "refused" (reason = "user_limit"),
        /// Clients disconnected because they made no request in time.
        pub idle: counter connections as "closed": "Clients disconnected, by reason." (reason = "idle"),
        /// Clients disconnected because they did not send or take their messages in time.
        pub slow: counter connections as "closed" (reason = "slow"),
        /// Clients disconnected because they passed descriptors.
        pub descriptors: counter connections as "closed" (reason = "descriptors"),
    }
}

/// Access rights of a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    Owner,
    Reader,
}

/// Maps users to roles.
#[derive(Clone, Copy, Debug)]
pub(super) struct AccessControl {
    /// The engine's user.
    pub(super) engine: u32,
    /// A further owner.
    pub(super) owner: Option<u32>,
    /// Other users may be readers.
    pub(super) others: bool,
}

/// Why a client gets no place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub(super) enum Full {
    /// All places for clients of this role are taken.
    #[error("{0} clients are connected already; try again")]
    All(usize),
    /// The user has all of its places.
    #[error("user {0} has {1} clients already; close one and try again")]
    User(u32, usize),
}

impl Role {
    /// Returns the refusal of a request that needs `access`.
    pub(super) fn refusal(self, access: Access) -> Option<Refusal> {
        let message = match (self, access) {
            (Self::Owner, _) | (Self::Reader, Access::Read) => return None,
            (Self::Reader, Access::Change | Access::Root) => {
                "you have read access only; root, the engine's user and the socket's owner may change the engine"
            }
            (Self::Reader, Access::Packets) => {
                "you have no access to packets; root, the engine's user and the socket's owner have it"
            }
        };
        Some(Refusal::new(Code::NotPermitted, message))
    }
}

impl AccessControl {
    /// Returns the role of a user, or `None` without access.
    pub(super) fn role(self, user: u32) -> Option<Role> {
        match user {
            0 => Some(Role::Owner),
            user if user == self.engine || Some(user) == self.owner => Some(Role::Owner),
            _ => self.others.then_some(Role::Reader),
        }
    }
}

/// Checks the places for one more client of `user`. `clients` has the user of each connected client.
///
/// # Errors
///
/// [`Full`] if there is no place.
pub(super) fn admit(clients: impl Iterator<Item = u32>, user: u32, role: Role) -> Result<(), Full> {
    let (all, own) = match (role, user) {
        (_, 0) => (CLIENTS, CLIENTS),
        (Role::Owner, _) => (CLIENTS - FOR_ROOT, PER_OWNER),
        (Role::Reader, _) => (CLIENTS - FOR_OWNERS, PER_READER),
    };
    let (mut count, mut theirs) = (0, 0);
    for client in clients {
        count += 1;
        theirs += usize::from(client == user);
    }
    match () {
        () if theirs >= own && own < all => Err(Full::User(user, own)),
        () if count >= all => Err(Full::All(all)),
        () => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_have_roles_and_roles_have_rights() {
        let access = AccessControl { engine: 100, owner: Some(7), others: true };
        let closed = AccessControl { others: false, ..access };
        for (user, open, shut) in [
            (0, Some(Role::Owner), Some(Role::Owner)),
            (100, Some(Role::Owner), Some(Role::Owner)),
            (7, Some(Role::Owner), Some(Role::Owner)),
            (8, Some(Role::Reader), None),
        ] {
            assert_eq!((access.role(user), closed.role(user)), (open, shut), "user {user}");
        }
        for (access, reader) in [(Access::Read, true), (Access::Packets, false), (Access::Change, false)] {
            assert_eq!(Role::Reader.refusal(access).is_none(), reader, "{access:?}");
            assert_eq!(Role::Owner.refusal(access), None, "{access:?}");
        }
    }

    /// Connects clients of `users`, in turn and until none gets a place. Returns the clients, and the last refusal of each user.
    fn fill(clients: &mut Vec<u32>, users: &[(u32, Role)]) -> Vec<Full> {
        loop {
            let before = clients.len();
            let mut refusals = Vec::new();
            for &(user, role) in users {
                match admit(clients.iter().copied(), user, role) {
                    Ok(()) => clients.push(user),
                    Err(full) => refusals.push(full),
                }
            }
            if clients.len() == before {
                return refusals;
            }
        }
    }

    #[test]
    fn no_user_takes_the_places_of_others() {
        let mut clients = Vec::new();
        assert_eq!(fill(&mut clients, &[(1000, Role::Reader)]), [Full::User(1000, PER_READER)]);
        let readers: Vec<_> = (1000..1100).map(|user| (user, Role::Reader)).collect();
        fill(&mut clients, &readers);
        assert_eq!(clients.len(), CLIENTS - FOR_OWNERS);
        assert_eq!(fill(&mut clients, &[(7, Role::Owner)]), [Full::All(CLIENTS - FOR_ROOT)]);
        assert_eq!(clients.len(), CLIENTS - FOR_ROOT);
        assert_eq!(fill(&mut clients, &[(0, Role::Owner)]), [Full::All(CLIENTS)]);
        assert_eq!(clients.len(), CLIENTS);
        // An owner alone leaves places for another owner; root may have all.
        let mut clients = Vec::new();
        assert_eq!(fill(&mut clients, &[(7, Role::Owner)]), [Full::User(7, PER_OWNER)]);
        assert!(admit(clients.iter().copied(), 8, Role::Owner).is_ok());
        let mut clients = Vec::new();
        assert_eq!(fill(&mut clients, &[(0, Role::Owner)]), [Full::All(CLIENTS)]);
    }
}

use super::*;
use crate::mock;

#[test]
fn a_user_with_many_silent_connections_pushes_out_none_of_another_user() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("ring");
    let config = Config { pending_max: 4, ..mock::config() };
    let mut endpoint = Endpoint::bind(&path, config).unwrap();
    let connect = || sys::connect(&path, Duration::from_secs(5)).unwrap();
    let mut held = vec![connect(), connect()];
    assert!(endpoint.accept().unwrap().is_none());
    // As if another user had made the older connection.
    let other = endpoint.pending[0].peer.uid + 7;
    endpoint.pending[0].peer.uid = other;
    for _ in 0..20 {
        held.push(connect());
        assert!(endpoint.accept().unwrap().is_none());
    }
    let users: Vec<_> = endpoint.pending.iter().map(|pending| pending.peer.uid == other).collect();
    assert_eq!(users, [true, false, false, false]);
    assert_eq!(endpoint.stats().failed, 18);
}

use super::*;
use proptest::prelude::*;

const ENGINE: Account = Account::ENGINE;

fn buffer(buckets: u16) -> ReorderBuffer<u32, ()> {
    ReorderBuffer::new(buckets, Limits { packets: 16, bytes: 1000 }, true)
}

fn flushed(buffer: &mut ReorderBuffer<u32, ()>) -> Vec<u32> {
    let mut out = Vec::new();
    buffer
        .flush(|held| {
            out.push(held.meta);
            Ok::<(), ()>(())
        })
        .unwrap();
    out
}

#[test]
fn packets_leave_in_order() {
    let mut buffer = buffer(1);
    let a = buffer.push_waiting(b"a", 1, (), (0, ENGINE));
    buffer.push_passed(b"b", 2, (0, ENGINE));
    let c = buffer.push_waiting(b"c", 3, (), (0, ENGINE));
    buffer.push_passed(b"d", 4, (0, ENGINE));
    assert!(flushed(&mut buffer).is_empty());
    buffer.discard(c);
    assert!(flushed(&mut buffer).is_empty());
    buffer.pass(a);
    assert_eq!(flushed(&mut buffer), [1, 2, 4]);
    assert!(buffer.is_empty());
    assert_eq!(buffer.shares.used().bytes, 0);
}

#[test]
fn buckets_do_not_wait_for_each_other() {
    let mut buffer = buffer(2);
    let a = buffer.push_waiting(b"a", 1, (), (0, ENGINE));
    let b = buffer.push_waiting(b"b", 2, (), (1, ENGINE));
    let c = buffer.push_waiting(b"c", 3, (), (1, ENGINE));
    assert!(!buffer.is_clear(0) && !buffer.is_clear(1));
    buffer.pass(b);
    assert_eq!(flushed(&mut buffer), [2]);
    buffer.pass(a);
    assert_eq!(flushed(&mut buffer), [1]);
    assert!(buffer.is_clear(0) && !buffer.is_clear(1));
    buffer.discard(c);
    assert!(flushed(&mut buffer).is_empty() && buffer.is_clear(1));
}

#[test]
fn a_moved_packet_is_the_last_of_its_bucket() {
    let mut buffer = buffer(2);
    let a = buffer.push_waiting(b"a", 1, (), (0, ENGINE));
    let b = buffer.push_waiting(b"b", 2, (), (0, ENGINE));
    let c = buffer.push_waiting(b"c", 3, (), (1, ENGINE));
    let moved = buffer.move_to(a, 1).unwrap();
    assert_eq!(buffer.move_to(a, 1), None);
    assert_eq!(flushed(&mut buffer), [0; 0]);
    assert_eq!(buffer.waiting(), 3);
    buffer.pass(moved);
    buffer.pass(b);
    assert_eq!(flushed(&mut buffer), [2]);
    buffer.pass(c);
    assert_eq!(flushed(&mut buffer), [3, 1]);
    assert_eq!((buffer.is_empty(), buffer.shares.used().bytes), (true, 0));
}

#[test]
fn a_second_verdict_has_no_effect() {
    let mut buffer = buffer(1);
    let a = buffer.push_waiting(b"a", 1, (), (0, ENGINE));
    buffer.pass(a);
    buffer.discard(a);
    buffer.pass(a);
    assert_eq!(flushed(&mut buffer), [1]);
    let b = buffer.push_waiting(b"b", 2, (), (0, ENGINE));
    assert_ne!(a, b);
    buffer.discard(a);
    buffer.replace(a, b"x");
    assert_eq!(buffer.waiting(), 1);
}

#[test]
fn borrowed_bytes_are_copied_only_at_the_end_of_the_burst() {
    let burst: [&[u8]; 4] = [b"zero", b"one", b"two", b"three"];
    let mut buffer = buffer(1);
    let ids: Vec<_> = burst
        .iter()
        .enumerate()
        .map(|(at, frame)| buffer.push_borrowed(at, frame.len(), at as u32, (), (0, ENGINE)))
        .collect();
    assert_eq!(buffer.shares.used().bytes, 15);
    let out = |buffer: &mut ReorderBuffer<u32, ()>| {
        let mut out = Vec::new();
        buffer
            .flush(|held| {
                out.push((held.borrowed(), held.bytes(|at| burst[at]).to_vec()));
                Ok::<(), ()>(())
            })
            .unwrap();
        out
    };
    buffer.pass(ids[0]);
    buffer.replace(ids[1], b"another");
    let (held, _) = buffer.waiting_mut(ids[2]).unwrap();
    held.parts_mut(|at| burst[at]).0[0] = b'T';
    assert_eq!(out(&mut buffer), [(Some(0), b"zero".to_vec())]);
    buffer.keep(|at| burst[at]);
    ids[1..].iter().for_each(|id| buffer.pass(*id));
    let rest: [&[u8]; 3] = [b"another", b"Two", b"three"];
    assert_eq!(out(&mut buffer), rest.map(|bytes| (None, bytes.to_vec())));
    assert_eq!(buffer.shares.used().bytes, 0);
}

#[test]
fn bounds_count_packets_and_bytes() {
    let mut buffer = ReorderBuffer::<u32, ()>::new(1, Limits { packets: 2, bytes: 10 }, true);
    let a = buffer.push_waiting(&[0; 4], 1, (), (0, ENGINE));
    assert!(buffer.has_room() && buffer.admits(ENGINE, 6) && !buffer.admits(ENGINE, 7));
    buffer.replace(a, &[0; 10]);
    assert!(!buffer.has_room());
    buffer.replace(a, &[0; 1]);
    assert!(buffer.has_room());
    buffer.push_passed(&[0; 1], 2, (0, ENGINE));
    assert!(!buffer.has_room() && !buffer.admits(ENGINE, 0));
}

/// A packet of a queue that is blocked by another queue's packet is charged to that one once it has passed.
#[test]
fn a_packet_that_waits_for_its_turn_is_charged_to_the_one_in_front() {
    let mut buffer = buffer(2);
    let [slow, other] = [buffer.shares.add_queue(1), buffer.shares.add_queue(1)];
    let front = buffer.push_waiting(b"front", 1, (), (0, slow));
    let behind = buffer.push_waiting(b"behind", 2, (), (0, other));
    assert_eq!((buffer.front_account(0), buffer.front_account(1)), (slow, ENGINE));
    buffer.pass(behind);
    assert_eq!(buffer.shares.usage(slow).0, Usage { packets: 2, bytes: 11 });
    assert_eq!(buffer.shares.usage(other).0, Usage::default());
    buffer.pass(front);
    assert_eq!(flushed(&mut buffer), [1, 2]);
}

#[test]
fn a_replacement_that_its_account_cannot_hold_is_refused() {
    let mut buffer = buffer(1);
    let queue = buffer.shares.add_queue(1);
    let a = buffer.push_waiting(b"a", 1, (), (0, queue));
    // Half of 1000 bytes is common, a quarter is the queue's.
    assert!(buffer.admit_replacement(a, 750) && buffer.admit_replacement(a, 1));
    assert!(!buffer.admit_replacement(a, 751));
    assert_eq!(buffer.shares.usage(queue).0.bytes, 750);
    buffer.replace(a, &[7; 3]);
    assert_eq!(buffer.shares.usage(queue).0.bytes, 3);
    buffer.discard(a);
    assert_eq!(buffer.shares.usage(queue).0, Usage { packets: 1, bytes: 0 });
    assert!(flushed(&mut buffer).is_empty() && buffer.is_empty());
}

#[test]
fn flows_of_a_set_do_not_wait_for_each_other() {
    let mut buffer = ReorderBuffer::<u32, ()>::new(8, Limits::default(), true);
    // Flows 0..4 have the same set.
    let ids: Vec<_> = (0..5)
        .map(|flow| {
            let bucket = buffer.bucket_of(flow);
            assert_eq!(bucket, [2, 1, 0, 3, 3][flow as usize]);
            buffer.push_waiting(b"", flow, (), (bucket, ENGINE))
        })
        .collect();
    assert_eq!((buffer.bucket_of(1), buffer.bucket_of(4), buffer.bucket_of(u32::MAX)), (1, 3, 6));
    buffer.pass(ids[1]);
    assert_eq!(flushed(&mut buffer), [1]);
    // Its bucket is clear, but the shared one may have packets of the flow.
    assert_eq!((buffer.bucket_of(4), buffer.bucket_of(1)), (3, 3));
    buffer.pass(ids[4]);
    assert!(flushed(&mut buffer).is_empty(), "flows 3 and 4 share a bucket");
    buffer.pass(ids[3]);
    assert_eq!(flushed(&mut buffer), [3, 4]);
    assert_eq!((buffer.bucket_of(4), buffer.bucket_of(0)), (1, 2));
}

/// A packet of the model.
struct Row {
    number: u32,
    passed: Option<bool>,
    id: Option<PacketId>,
    account: Account,
    bytes: usize,
}

proptest! {
    /// The model: a list per bucket. Packets that passed leave in order and overtake no waiting packet. The accounts are the sums over
    /// the lists.
    #[test]
    fn agrees_with_lists(ops in proptest::collection::vec((0u8..6, 0usize..8, 0u16..3), 1..200)) {
        let mut buffer = ReorderBuffer::<u32, ()>::new(3, Limits { packets: 40, bytes: 4000 }, true);
        let accounts = [ENGINE, buffer.shares.add_queue(1), buffer.shares.add_queue(2)];
        let mut lists: [Vec<Row>; 3] = Default::default();
        for (number, (op, pick, bucket)) in (0..).zip(ops) {
            let list = &mut lists[usize::from(bucket)];
            let (account, bytes) = (accounts[pick % 3], vec![0; pick * 50]);
            prop_assert_eq!(buffer.front_account(bucket), list.first().map_or(ENGINE, |row| row.account));
            let open: Vec<_> = (0..list.len()).filter(|&i| list[i].passed.is_none()).collect();
            let row = open.get(pick % open.len().max(1)).copied();
            match (op, row) {
                (0, _) if buffer.admits(account, bytes.len()) => {
                    let id = buffer.push_waiting(&bytes, number, (), (bucket, account));
                    list.push(Row { number, passed: None, id: Some(id), account, bytes: bytes.len() });
                }
                (1, _) if !buffer.is_clear(bucket) && buffer.admits(account, bytes.len()) => {
                    buffer.push_passed(&bytes, number, (bucket, account));
                    list.push(Row { number, passed: Some(true), id: None, account, bytes: bytes.len() });
                }
                (2, Some(i)) => {
                    let front = list[0].account;
                    if front != list[i].account && buffer.admits(front, list[i].bytes) {
                        list[i].account = front;
                    }
                    list[i].passed = Some(true);
                    buffer.pass(list[i].id.expect("a waiting packet"));
                }
                (3, Some(i)) => {
                    (list[i].passed, list[i].bytes) = (Some(false), 0);
                    buffer.discard(list[i].id.expect("a waiting packet"));
                }
                (4, Some(i)) => {
                    let id = list[i].id.expect("a waiting packet");
                    if buffer.admit_replacement(id, bytes.len()) {
                        list[i].bytes = bytes.len();
                        buffer.replace(id, &bytes);
                    }
                }
                (5, Some(i)) if buffer.admits(account, list[i].bytes) => {
                    list[i].account = account;
                    buffer.charge_to(list[i].id.expect("a waiting packet"), account);
                }
                _ => {}
            }
            // The other buckets are already flushed.
            let decided = list.iter().take_while(|row| row.passed.is_some()).count();
            let expected: Vec<_> =
                list.drain(..decided).filter(|row| row.passed == Some(true)).map(|row| row.number).collect();
            prop_assert_eq!(flushed(&mut buffer), expected);
            prop_assert_eq!(buffer.is_clear(bucket), lists[usize::from(bucket)].is_empty());
            let waiting = lists.iter().flatten().filter(|row| row.passed.is_none()).count();
            prop_assert_eq!(buffer.waiting(), waiting);
            for account in accounts {
                let own = lists.iter().flatten().filter(|row| row.account == account);
                let sum = own.fold(Usage::default(), |sum, row| Usage {
                    packets: sum.packets + 1,
                    bytes: sum.bytes + row.bytes,
                });
                prop_assert_eq!(buffer.shares.usage(account).0, sum);
            }
        }
    }

    /// Packets of a flow leave in the order in which they were added, however many flows meet in a set.
    #[test]
    fn a_flow_keeps_its_order(ops in proptest::collection::vec((0u32..7, 0usize..16, 0u8..3), 1..300)) {
        let mut buffer = ReorderBuffer::<u32, u32>::new(4, Limits::default(), true);
        let mut waiting: Vec<(u32, PacketId)> = Vec::new();
        let mut last = [0; 7];
        for (number, (flow, pick, op)) in (1..).zip(ops) {
            if op > 0 {
                let bucket = buffer.bucket_of(flow);
                waiting.push((flow, buffer.push_waiting(&[], number << 3 | flow, flow, (bucket, ENGINE))));
            } else if !waiting.is_empty() {
                let (_, id) = waiting.remove(pick % waiting.len());
                buffer.pass(id);
            }
            buffer
                .flush(|held| {
                    let (number, flow) = (held.meta >> 3, (held.meta & 7) as usize);
                    assert!(number > last[flow]);
                    last[flow] = number;
                    Ok::<(), ()>(())
                })
                .unwrap();
            // A flow that is alone in its bucket waits only for its own packets.
            prop_assert!(!waiting.is_empty() || buffer.is_empty());
        }
    }
}

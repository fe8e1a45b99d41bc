//! The form of a port's [`Object`] in a message: the numbers are its kind, variant and engine, the text has the names of the port and of the interface.

use std::io;

use towpath_port::Object;

use super::message::{Kind, Message, TEXT};

/// The request to open `object` of `port`.
pub(super) fn request(port: &str, object: &Object) -> io::Result<Message> {
    let (kind, variant, interface) = match object {
        Object::PacketSocket => (0, false, ""),
        Object::XdpSocket => (1, false, ""),
        Object::XdpProgram { frags } => (2, *frags, ""),
        Object::TunNode => (3, false, ""),
        Object::TunQueue { multi_queue, interface } => (4, *multi_queue, interface.as_str()),
        Object::RawSockets => (5, false, ""),
        Object::IngressProgram => (6, false, ""),
        Object::FlowMap { .. } => (7, false, ""),
        Object::FlowProgram { .. } => (8, false, ""),
        Object::XdpFlowProgram { frags, attach: true, .. } => (9, *frags, ""),
        Object::XdpFlowProgram { frags, attach: false, .. } => (10, *frags, ""),
    };
    let engine = match object {
        Object::FlowMap { engine }
        | Object::FlowProgram { engine }
        | Object::XdpFlowProgram { engine, .. } => *engine,
        _ => 0,
    };
    let text = [port.as_bytes(), &[0], interface.as_bytes()].concat();
    if text.len() > TEXT {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    Ok(Message { numbers: [kind, u32::from(variant), engine], text, ..Message::new(Kind::Open) })
}

/// The port's name and the object of a request. `None`: the request is malformed.
pub(super) fn of(request: &Message) -> Option<(&str, Object)> {
    let (port, interface) = std::str::from_utf8(&request.text).ok()?.split_once('\0')?;
    let [kind, variant, engine] = request.numbers;
    let variant = variant == 1;
    let object = match kind {
        0 => Object::PacketSocket,
        1 => Object::XdpSocket,
        2 => Object::XdpProgram { frags: variant },
        3 => Object::TunNode,
        4 => Object::TunQueue { multi_queue: variant, interface: interface.to_owned() },
        5 => Object::RawSockets,
        6 => Object::IngressProgram,
        7 => Object::FlowMap { engine },
        8 => Object::FlowProgram { engine },
        9 | 10 => Object::XdpFlowProgram { engine, frags: variant, attach: kind == 9 },
        _ => return None,
    };
    Some((port, object))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn objects_survive_a_message() {
        let objects = [
            Object::PacketSocket,
            Object::XdpSocket,
            Object::XdpProgram { frags: true },
            Object::XdpProgram { frags: false },
            Object::TunNode,
            Object::TunQueue { multi_queue: true, interface: "tun7".into() },
            Object::RawSockets,
            Object::IngressProgram,
            Object::FlowMap { engine: 4711 },
            Object::FlowProgram { engine: 4711 },
            Object::XdpFlowProgram { engine: 4711, frags: true, attach: false },
            Object::XdpFlowProgram { engine: 4711, frags: false, attach: true },
        ];
        for object in objects {
            assert_eq!(of(&request("wan", &object).unwrap()), Some(("wan", object)));
        }
        let unknown = Message { numbers: [11, 0, 0], text: b"wan\0".to_vec(), ..Message::new(Kind::Open) };
        assert_eq!(of(&unknown), None);
        assert!(request(&"x".repeat(TEXT), &Object::XdpSocket).is_err());
    }
}
